"""ONNX graphs as differentiable functions: :class:`OnnxFunction` on numpy arrays, ``OrtLayer`` in torch.

- ``mode`` is the rewrite that makes BatchNormalization and Dropout torch's in ``train()`` and
  ``eval()``; ``graphs`` traces the model with its running statistics as inputs and their new values
  as outputs.
- ``own_gradient`` splits the gradient graph into what the forward pass computes and what needs a
  cotangent, and runs the halves on the caller's memory (``memory``: addresses in, dlpack out, on
  any device).
- ``backend_gradient`` does the same by a backend that is a ``LayerBackend``, which is found by name, so
  that layers import no backend. Outputs of TrainingAgent are copied: its backward pass reuses their
  memory, even that of given buffers.

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
