"""The optimizer on forward and backward passes, at its module path of the older package."""

from ortflex_plugins.onnxcustom.forward_backward_optimizer import (
    OrtGradientForwardBackwardOptimizer,
)

__all__ = ["OrtGradientForwardBackwardOptimizer"]
