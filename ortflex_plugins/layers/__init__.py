"""ONNX graphs as differentiable functions: on numpy arrays, and as layers of torch.

>>> from ortflex_plugins.layers import OnnxFunction
"""

from typing import TYPE_CHECKING, Any

from ortflex_plugins.layers.function import OnnxFunction, Saved

if TYPE_CHECKING:
    from ortflex_plugins.layers.torch_layer import OrtLayer

__all__ = ["OnnxFunction", "OrtLayer", "Saved"]


def __getattr__(name: str) -> Any:
    """Torch is imported only by those who ask for its layer."""
    if name == "OrtLayer":
        from ortflex_plugins.layers.torch_layer import OrtLayer

        return OrtLayer
    raise AttributeError(f"module 'ortflex_plugins.layers' has no attribute {name!r}")
