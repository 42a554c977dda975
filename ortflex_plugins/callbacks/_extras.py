"""Callbacks that need an optional package."""

from __future__ import annotations

from importlib.util import find_spec

from ortflex_core import ConfigError, install_command


def require(callback: str, package: str = "") -> None:
    """Refuse a callback whose package is not installed; nothing is imported."""
    package = package or callback
    if find_spec(package) is None:
        raise ConfigError(
            f"the callback {callback!r} needs {package}, which is not installed: "
            f"{install_command(callback)}"
        )
