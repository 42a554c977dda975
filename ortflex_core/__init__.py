"""ortflex: train ONNX models with onnxruntime.

>>> from ortflex_core import Trainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Trainer", "check_model", "gradient_model", "registry"]

if TYPE_CHECKING:
    from ortflex_core import registry
    from ortflex_core.check import check_model
    from ortflex_core.trainer import Trainer
    from ortflex_core.vjp import gradient_model

_PLACES = {"Trainer": "trainer", "check_model": "check", "gradient_model": "vjp"}


def __getattr__(name: str) -> Any:
    """Import on first use: ``ortflex plugins`` and ``--help`` need neither onnx nor numpy."""
    import importlib

    if name == "registry":
        return importlib.import_module("ortflex_core.registry")
    if name in _PLACES:
        return getattr(importlib.import_module(f"ortflex_core.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'ortflex_core' has no attribute {name!r}")
