"""Smaller graphs that compute the same: patterns tried while a graph is traced once more.

Differentiate first, optimize after: no gradient rule has to know what is made here. Every pattern
keeps values to float32 rounding, and each is tested for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx

from ortflex_core.cotangents import same_shape
from ortflex_core.ops import Node, Tensor, Trace

_Pattern = Callable[["_Rebuild", Node, Sequence[Tensor | None]], Tensor | None]


def optimize(
    trace: Trace,
    outputs: Mapping[str, Tensor],
    replaced: Mapping[Tensor, Tensor] | None = None,
    parameters: Sequence[str] = (),
) -> tuple[Trace, dict[str, Tensor]]:
    """Trace again what ``outputs`` depend on, with patterns applied.

    Args:
        trace: the graph.
        outputs: its outputs.
        replaced: tensors that are to be taken for others, which were made before them.
        parameters: inputs of rank 1 that may become rows, [n] → [1, n], where all their uses allow
            it; their outputs ``new/<name>`` then are rows, too.
    """
    return _Rebuild(trace, outputs, replaced or {}, parameters).run()


class _Rebuild:
    """One walk over the old graph in order, making the new one."""

    def __init__(
        self,
        old: Trace,
        outputs: Mapping[str, Tensor],
        replaced: Mapping[Tensor, Tensor],
        parameters: Sequence[str],
    ) -> None:
        self.old, self.outputs, self.replaced = old, outputs, replaced
        self.trace = Trace(old.opsets)
        self.nodes = self._needed()
        self.uses: Counter[Tensor] = Counter(self._resolved(t) for t in outputs.values())
        for node in self.nodes:
            self.uses.update(self._resolved(a) for a in node.arguments)
        self.values: dict[Tensor, Tensor] = {}
        rows = self._rows(parameters)
        for name, tensor in old.inputs.items():
            if self.uses[tensor]:
                shape = (1, *(tensor.shape or ())) if name in rows else tensor.shape
                self.values[tensor] = self.trace.input(name, tensor.dtype, shape)

    def _resolved(self, tensor: Tensor) -> Tensor:
        while tensor in self.replaced:
            tensor = self.replaced[tensor]
        return tensor

    def _needed(self) -> list[Node]:
        needed: set[int] = set()
        pending = [self._resolved(t).node for t in self.outputs.values()]
        while pending:
            node = pending.pop()
            if node is not None and id(node) not in needed:
                needed.add(id(node))
                pending.extend(self._resolved(a).node for a in node.arguments)
        return [n for n in self.old.nodes if id(n) in needed]

    def value(self, tensor: Tensor) -> Tensor:
        """The new tensor of an old one."""
        tensor = self._resolved(tensor)
        if tensor not in self.values:
            if tensor.host is not None:
                self.values[tensor] = self.trace.bind(tensor.host, tensor.dtype)
            else:
                self.values[tensor] = self.trace.constant(tensor.constant, tensor.dtype)
        return self.values[tensor]

    def run(self) -> tuple[Trace, dict[str, Tensor]]:
        for node in self.nodes:
            inputs = [None if i is None else self.value(i) for i in node.inputs]
            pattern = _PATTERNS.get(node.op_type) if node.domain == "" else None
            found = pattern(self, node, inputs) if pattern is not None else None
            if found is not None:
                made: Sequence[Tensor] = (found,)
            else:
                made = self.trace.node(
                    node.op_type,
                    inputs,
                    node.attributes,
                    outputs=len(node.outputs),
                    domain=node.domain,
                    name=node.name,
                    captures={n: self.value(t) for n, t in node.captures.items()},
                    types=[(o.dtype, o.shape) for o in node.outputs],
                )
            for old, new in zip(node.outputs, made, strict=True):
                new.hint = new.hint or old.hint
                self.values[old] = new
        return self.trace, {name: self.value(t) for name, t in self.outputs.items()}

    def only_use(self, tensor: Tensor) -> bool:
        """Whether the node at hand is all that reads an old tensor."""
        return self.uses[self._resolved(tensor)] == 1

    def _rows(self, parameters: Sequence[str]) -> set[str]:
        """The rank-1 parameters that can be held as [1, n]: biases of Gemm, updated by a sum of rows.

        Along a chain of steps every version of the parameter has to allow it.
        """
        readers: dict[Tensor, list[Node]] = {}
        for node in self.nodes:
            for argument in node.arguments:
                readers.setdefault(self._resolved(argument), []).append(node)
        out = set()
        for name in parameters:
            tensor: Tensor | None = self.old.inputs.get(name)
            if tensor is None or tensor.rank != 1:
                continue
            last = self._resolved(self.outputs[f"new/{name}"])
            while tensor is not None and tensor is not last:
                tensor = self._next_row(tensor, readers.get(tensor, []))
            if tensor is last:
                out.add(name)
        return out

    def _next_row(self, tensor: Tensor, readers: Sequence[Node]) -> Tensor | None:
        updated = None
        for node in readers:
            if node.op_type == "Gemm" and node.inputs[2:] == (tensor,):
                continue
            subtracts = node.op_type == "Sub" and node.inputs[0] is tensor
            if updated is not None or not subtracts or self._row_sum(node.inputs[1]) is None:
                return None
            updated = node.outputs[0]
        return updated

    def _row_sum(self, tensor: Tensor | None) -> Tensor | None:
        """X of ReduceSum(x, axis 0) with a number of rows that is known."""
        if tensor is None:
            return None
        tensor = self._resolved(tensor)
        node = tensor.node
        if node is None or node.op_type != "ReduceSum" or self.uses[tensor] != 1:
            return None
        x, axes = (*node.inputs, None)[:2]
        keep = node.attributes.get("keepdims")
        static = x is not None and x.rank == 2 and isinstance((x.shape or (None,))[0], int)
        along = axes is not None and axes.constant is not None and axes.constant.tolist() == [0]
        return x if static and along and keep is not None and not keep.i else None


def _subtract(build: _Rebuild, node: Node, inputs: Sequence[Tensor | None]) -> Tensor | None:
    """C − α·A′B′ is one Gemm, and so is a row minus the sum of rows: C − 1ᵀX."""
    left, right = inputs
    assert left is not None
    assert right is not None
    product = build._resolved(node.inputs[1]).node if node.inputs[1] is not None else None
    rows = build._row_sum(node.inputs[1])
    if rows is not None and left.rank == 2:
        ones = build.trace.constant(np.ones((1, rows.shape[0]), np.float32), rows.dtype)  # type: ignore[index]
        return build.trace.op.Gemm(ones, build.value(rows), left, alpha=-1.0)  # type: ignore[no-any-return]
    if product is None or node.inputs[1] is None or not build.only_use(node.inputs[1]):
        return None
    made = right.node
    if (
        made is None
        or made.op_type != "Gemm"
        or len(made.inputs) > 2
        or not same_shape(left.shape, right.shape)
    ):
        return None
    settings = {k: onnx.helper.get_attribute_value(v) for k, v in made.attributes.items()}
    settings["alpha"] = -settings.get("alpha", 1.0)
    return build.trace.op.Gemm(*made.inputs, left, **settings)  # type: ignore[no-any-return]


def _sum(build: _Rebuild, node: Node, inputs: Sequence[Tensor | None]) -> Tensor | None:
    """ReduceSum(x·x) is ReduceSumSquare(x)."""
    squared = build._resolved(node.inputs[0]).node if node.inputs[0] is not None else None
    if squared is None or squared.op_type != "Mul" or squared.inputs[0] is not squared.inputs[1]:
        return None
    axes = inputs[1] if len(inputs) > 1 else None
    if axes is not None and axes.constant is None:
        return None
    assert squared.inputs[0] is not None
    chosen = None if axes is None or axes.constant is None else axes.constant.tolist()
    keep = node.attributes["keepdims"].i if "keepdims" in node.attributes else 1
    x = build.value(squared.inputs[0])
    return build.trace.op.ReduceSumSquare(x, axes=chosen, keepdims=keep)  # type: ignore[no-any-return]


def _sign(build: _Rebuild, node: Node, inputs: Sequence[Tensor | None]) -> Tensor | None:
    """The sign of what a Relu gave: 0 or 1, which HardSigmoid with a huge slope finds quicker.

    They differ for positive values below 1/3e38, which float32 has only as denormal numbers.
    """
    (y,) = inputs
    if y is None or y.node is None or y.node.op_type != "Relu" or y.dtype != onnx.TensorProto.FLOAT:
        return None
    return build.trace.op.HardSigmoid(y, alpha=3e38, beta=0.0)  # type: ignore[no-any-return]


_PATTERNS: Mapping[str, _Pattern] = {"Sub": _subtract, "ReduceSum": _sum, "Sign": _sign}
