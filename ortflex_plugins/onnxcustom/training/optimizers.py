"""The optimizer whose step the runtime owns, at its module path of the older package."""

from ortflex_plugins.onnxcustom.optimizer import (
    OrtGradientOptimizer,
)

__all__ = ["OrtGradientOptimizer"]
