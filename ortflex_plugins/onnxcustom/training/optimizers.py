"""The optimizer of models that contain their loss, at its module path of the older package."""

from ortflex_plugins.onnxcustom.optimizer import OrtGradientOptimizer

__all__ = ["OrtGradientOptimizer"]
