"""Flower, if it is installed."""

from __future__ import annotations

import importlib
from typing import Any

from ortflex_core import ConfigError, install_command

OLDEST = (1, 22)
"""The first version whose Message API has everything that is used here."""


def require_flower(module: str = "flwr.app") -> Any:
    """A module of Flower."""
    try:
        flwr = importlib.import_module("flwr")
    except ImportError as error:
        raise ConfigError(
            f"Flower is not installed: {install_command('stock', 'flower')}. It needs an environment with "
            "protobuf below version 7"
        ) from error
    version = str(getattr(flwr, "__version__", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise ConfigError(
            f"Flower {version} is too old, its Message API lacks what is needed; expected "
            f"{'.'.join(map(str, OLDEST))} or newer: {install_command('stock', 'flower')} --upgrade"
        )
    return importlib.import_module(module)
