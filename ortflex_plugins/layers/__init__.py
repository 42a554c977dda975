"""ONNX graphs as differentiable functions: :class:`OnnxFunction` on numpy arrays, ``OrtLayer`` in torch.

- ``mode`` rewrites BatchNormalization and Dropout to behave as in torch's ``train()`` and ``eval()``;
  ``graphs`` traces the model with its running statistics as inputs and their new values as outputs.
- ``own_gradient`` splits the gradient graph into the forward pass and the nodes that need a cotangent,
  and runs both halves on the caller's memory (``memory``: addresses in, dlpack out, on any device).
- ``backend_gradient`` does the same by a ``LayerBackend``, which is found by its name, so that layers
  import no backend. Outputs of TrainingAgent are copied, because its backward pass reuses their memory,
  even the memory of given buffers.

>>> from ortflex_plugins.layers import OnnxFunction
"""

from typing import TYPE_CHECKING, Any

from ortflex_plugins.layers.function import OnnxFunction, Saved
from ortflex_plugins.layers.memory import Buffer

if TYPE_CHECKING:
    from ortflex_plugins.layers.torch_layer import OrtLayer

__all__ = ["Buffer", "OnnxFunction", "OrtLayer", "Saved"]


def __getattr__(name: str) -> Any:
    """Import torch only for its layer."""
    if name == "OrtLayer":
        from ortflex_plugins.layers.torch_layer import OrtLayer

        return OrtLayer
    raise AttributeError(f"module 'ortflex_plugins.layers' has no attribute {name!r}")
