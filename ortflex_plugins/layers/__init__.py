"""ONNX graphs as differentiable functions: :class:`OnnxFunction` on numpy arrays, ``OrtLayer`` in torch.

- ``mode`` is the rewrite that makes BatchNormalization and Dropout torch's in ``train()`` and ``eval()``;
  ``graphs`` traces the model with its running statistics as inputs and their new values as outputs.
- ``own_gradient`` splits the gradient graph into what the forward pass computes and what needs a
  cotangent, and runs the halves on memory that others own (``memory``: addresses in, dlpack out, on any
  device).
- ``backend_gradient`` does the same by a backend that is a ``LayerBackend``, which is found by name, so
  that layers import no backend. What TrainingAgent has made is copied: its backward pass reuses the
  memory of outputs, those that were handed to it ready-made included.

>>> from ortflex_plugins.layers import OnnxFunction
"""

from typing import TYPE_CHECKING, Any

from ortflex_plugins.layers.function import OnnxFunction, Saved
from ortflex_plugins.layers.memory import Buffer

if TYPE_CHECKING:
    from ortflex_plugins.layers.torch_layer import OrtLayer

__all__ = ["Buffer", "OnnxFunction", "OrtLayer", "Saved"]


def __getattr__(name: str) -> Any:
    """Torch is imported only by those who ask for its layer."""
    if name == "OrtLayer":
        from ortflex_plugins.layers.torch_layer import OrtLayer

        return OrtLayer
    raise AttributeError(f"module 'ortflex_plugins.layers' has no attribute {name!r}")
