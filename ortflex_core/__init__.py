"""ortflex: train ONNX models with onnxruntime.

>>> from ortflex_core import Trainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["Trainer", "check_model", "gradient_model", "registry"]

from ortflex_core import moved

if TYPE_CHECKING:
    from ortflex_core import registry
    from ortflex_core.check import check_model
    from ortflex_core.programs.gradient_model import gradient_model
    from ortflex_core.training.trainer import Trainer

_PLACES = {
    "Trainer": "training.trainer",
    "check_model": "check",
    "gradient_model": "programs.gradient_model",
}


def __getattr__(name: str) -> Any:
    """Import on first use: ``ortflex plugins`` and ``--help`` need neither onnx nor numpy."""
    import importlib

    if name == "registry" or name in moved.MODULES:
        return importlib.import_module(f"ortflex_core.{name}")
    if name in _PLACES:
        return getattr(importlib.import_module(f"ortflex_core.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'ortflex_core' has no attribute {name!r}")


moved.install()
