"""ortflex: train ONNX models with onnxruntime.

>>> from ortflex_core import Trainer
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["Trainer", "check_model", "gradient_model", "registry"]

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

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

    if name in _PLACES:
        return getattr(importlib.import_module(f"ortflex_core.{_PLACES[name]}"), name)
    if name == "registry" or (name[:1] != "_" and _Moved.find_spec(f"ortflex_core.{name}")):
        return importlib.import_module(f"ortflex_core.{name}")
    raise AttributeError(f"module 'ortflex_core' has no attribute {name!r}")


class _Moved:
    """Finds import paths of 0.1; their table is imported only when a module is not found."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        if not name.startswith("ortflex_core."):
            return None
        from ortflex_core.moved import find_spec

        return find_spec(name)


sys.meta_path.append(_Moved)
