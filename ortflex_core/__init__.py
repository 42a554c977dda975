"""ortflex: train ONNX models with onnxruntime.

>>> from ortflex_core import Trainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Trainer", "registry"]

if TYPE_CHECKING:
    from ortflex_core import registry
    from ortflex_core.trainer import Trainer


def __getattr__(name: str) -> Any:
    """Import on first use: ``ortflex plugins`` and ``--help`` need neither onnx nor numpy."""
    if name == "Trainer":
        from ortflex_core.trainer import Trainer

        return Trainer
    if name == "registry":
        import ortflex_core.registry

        return ortflex_core.registry
    raise AttributeError(f"module 'ortflex_core' has no attribute {name!r}")
