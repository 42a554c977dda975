"""Host scalars as nodes of a graph: the same arithmetic in float64, from inputs of rank 0.

The host computes the host expressions of a program. A portable step has no host: the rate, the
hyperparameters and the number of finished steps are inputs, denominators are computed from the
labels and weights of the batch, and the expressions are nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from ortflex_core.graph.host_scalars import Host
from ortflex_core.portable.assembly import Assembly


class Scalars:
    """The values of host expressions as tensors of an assembly; equal expressions are computed once.

    Args:
        assembly: where the nodes go.
        symbol: gives the name of the float64 scalar that has a symbol's value.
    """

    def __init__(self, assembly: Assembly, symbol: Callable[[str], str]) -> None:
        self._assembly, self._symbol = assembly, symbol
        self._known: dict[Host, str] = {}
        self._cast: dict[tuple[str, int], str] = {}

    def value(self, expression: Host | float) -> str:
        """The name of a float64 scalar."""
        if not isinstance(expression, Host):
            return self._assembly.constant(expression)
        if expression not in self._known:
            if expression.op == "symbol":
                name = self._symbol(str(expression.args[0]))
            else:
                name = self._operator(expression)
            self._known[expression] = name
        return self._known[expression]

    def _operator(self, expression: Host) -> str:
        places = [self.value(a) for a in expression.args]
        if expression.op == "Div" and expression.args[0] == 1.0:
            # onnxruntime replaces a product (1/a)·b by b/a, which differs in the last bit.
            return self._assembly.node("Reciprocal", places[1])
        return self._assembly.node(expression.op, *places)

    def cast(self, expression: Host, dtype: int) -> str:
        """The name of a scalar of any type."""
        name = self.value(expression)
        if dtype == TensorProto.DOUBLE:
            return name
        if (name, dtype) not in self._cast:
            self._cast[name, dtype] = self._assembly.node("Cast", name, to=dtype)
        return self._cast[name, dtype]
