"""Host scalars as nodes of a graph: the same arithmetic in float64, from inputs of rank 0.

The host computes the host expressions of a program. A portable step has no host: the rate, the
hyperparameters and the number of finished steps are inputs, denominators are computed from the
labels and weights of the batch, and the expressions are nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from ortflex_core.kernel.host_scalars import Host, HostNodes
from ortflex_core.training.portable.assembly import Assembly


class Scalars:
    """The values of host expressions as tensors of an assembly; equal expressions are computed once."""

    def __init__(self, assembly: Assembly, symbol: Callable[[str], str]) -> None:
        self._assembly = assembly
        self._nodes = HostNodes(symbol, assembly.constant, assembly.node)
        self._cast: dict[tuple[str, int], str] = {}

    def cast(self, expression: Host, dtype: int) -> str:
        """The name of a scalar of any type."""
        name = self._nodes.value(expression)
        if dtype == TensorProto.DOUBLE:
            return name
        if (name, dtype) not in self._cast:
            self._cast[name, dtype] = self._assembly.node("Cast", name, to=dtype)
        return self._cast[name, dtype]
