"""Optimization of graphs: patterns are applied while a graph is traced again.

Optimization comes after differentiation, so no gradient rule has to handle the operators that are
created here. Every pattern (:mod:`~ortflex_core.compiler.programs.patterns`) keeps values to float32
rounding, and each is tested for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import onnx

from ortflex_core.compiler.graph.ops import Inputs, Node, Tensor, Trace
from ortflex_core.compiler.graph.ports import Key, Port
from ortflex_core.compiler.graph.program import ancestors
from ortflex_core.compiler.programs import patterns
from ortflex_core.kernel.types import Shape

K = TypeVar("K", bound=Key)
_SHORT = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
"""Patterns are not applied in these types, because some have numbers out of their range."""


def optimize(
    trace: Trace,
    outputs: Mapping[K, Tensor],
    replaced: Mapping[Tensor, Tensor] | None = None,
    parameters: Sequence[Port] = (),
    without: Collection[str] = (),
) -> tuple[Trace, dict[K, Tensor]]:
    """Trace again the nodes that ``outputs`` depend on, with patterns applied.

    Args:
        trace: the graph.
        outputs: its outputs.
        replaced: tensors and their replacements, which do not depend on them.
        parameters: inputs of rank 1 that may become rows, [n] → [1, n], if all their uses allow it;
            their new values then are rows, too, and the costs of loss terms may come with the shape
            [1, 1]: the graph is for an engine that binds memory, not shapes.
        without: operators that are not changed.
    """
    table = {name: pattern for name, pattern in patterns.FIRST.items() if name not in without}
    # The first pass rewrites sums; then the second can see which parameters can be rows.
    trace, rewritten = Rebuild(trace, outputs, replaced or {}, table, bound=bool(parameters)).run()
    if not any(node.op_type == "ReduceSum" for node in trace.nodes):
        return trace, rewritten
    return Rebuild(trace, rewritten, {}, patterns.SECOND, parameters).run()


class Rebuild:
    """One pass over the old graph in order, which makes the new one."""

    def __init__(
        self,
        old: Trace,
        outputs: Mapping[Any, Tensor],
        replaced: Mapping[Tensor, Tensor],
        table: Mapping[str, patterns.Pattern],
        parameters: Sequence[Port] = (),
        bound: bool = False,
    ) -> None:
        self.old, self.outputs, self.replaced, self.table = old, outputs, replaced, table
        self.trace = Trace(old.opsets)
        needed = ancestors(map(self.resolved, outputs.values()), self.resolved)
        self.nodes = self._sorted([node for node in old.nodes if id(node) in needed])
        self.uses: Counter[Tensor] = Counter(self.resolved(t) for t in outputs.values())
        for node in self.nodes:
            self.uses.update(self.resolved(a) for a in node.arguments)
        self.values: dict[Tensor, Tensor] = {}
        rows = self._rows(parameters)
        for key, tensor in old.inputs.items():
            # Unused ports are kept, too, because outputs are their new values.
            if self.uses[tensor] or isinstance(key, Port):
                shape = (1, *(tensor.shape or ())) if key in rows else tensor.shape
                self.values[tensor] = self.trace.input(key, tensor.dtype, shape)
        # Only the host reads totals, so their shape does not matter.
        costs = [t for k, t in outputs.items() if isinstance(k, Port) and k.role == "loss"]
        totals = {self.resolved(t) for t in costs} if bound else set()
        self.totals = {t for t in totals if self.uses[t] == 1}

    def resolved(self, tensor: Tensor) -> Tensor:
        """The old tensor that replaces an old tensor."""
        while tensor in self.replaced:
            tensor = self.replaced[tensor]
        return tensor

    def source(self, tensor: Tensor | None, *op_types: str) -> Node | None:
        """The old node that made an old tensor, if it is one of these standard operators."""
        node = None if tensor is None else self.resolved(tensor).node
        return node if node and node.domain == "" and node.op_type in op_types else None

    def _sorted(self, nodes: list[Node]) -> list[Node]:
        """The same nodes in topological order: a replacement may come from a later node."""
        out: list[Node] = []
        done: set[int] = set()
        for first in nodes:
            pending = [first]
            while pending:
                sources = (self.resolved(a).node for a in pending[-1].arguments)
                missing = [s for s in sources if s is not None and id(s) not in done]
                if missing and id(pending[-1]) not in done:
                    pending += missing
                    continue
                node = pending.pop()
                if id(node) not in done:
                    done.add(id(node))
                    out.append(node)
        return out

    def value(self, tensor: Tensor) -> Tensor:
        """The new tensor that corresponds to an old one."""
        tensor = self.resolved(tensor)
        if tensor not in self.values:
            if tensor.host is not None:
                self.values[tensor] = self.trace.bind(tensor.host, tensor.dtype)
            else:
                assert tensor.constant is not None, f"{tensor!r} is read before it is made"
                self.values[tensor] = self.trace.constant(tensor.constant, tensor.dtype)
        return self.values[tensor]

    def make(
        self, op_type: str, inputs: Inputs, dtype: int, shape: Shape | None, **attributes: Any
    ) -> Tensor:
        """Create a node of new tensors with known types, without inference."""
        protos = {k: onnx.helper.make_attribute(k, v) for k, v in attributes.items()}
        inputs = patterns.ranked(self, op_type, inputs)
        return self.trace.node(op_type, inputs, protos, types=[(dtype, shape)])[0]

    def run(self) -> tuple[Trace, dict[Any, Tensor]]:
        """Build the new graph."""
        for node in self.nodes:
            self.trace.current_part = node.part
            inputs = [None if i is None else self.value(i) for i in node.inputs]
            plain = node.domain == "" and all(o.dtype not in _SHORT for o in node.outputs)
            pattern = self.table.get(node.op_type) if plain else None
            replacement = pattern(self, node, inputs) if pattern is not None else None
            if replacement is not None:
                outputs: Sequence[Tensor] = (replacement,)
            else:
                outputs = self.trace.node(
                    node.op_type,
                    patterns.ranked(self, node.op_type, inputs) if plain else inputs,
                    node.attributes,
                    outputs=len(node.outputs),
                    domain=node.domain,
                    name=node.name,
                    captures={n: self.value(t) for n, t in node.captures.items()},
                    types=[(o.dtype, o.shape) for o in node.outputs],
                )
            for old, new in zip(node.outputs, outputs, strict=True):
                new.hint = new.hint or old.hint
                self.values[old] = new
        return self.trace, {name: self.value(t) for name, t in self.outputs.items()}

    def only_use(self, tensor: Tensor) -> bool:
        """Whether the current node is the only reader of an old tensor."""
        return self.uses[self.resolved(tensor)] == 1

    def _rows(self, parameters: Sequence[Port]) -> set[Port]:
        """The rank-1 parameters that can be held as [1, n]: biases of Gemm, updated by a sum of rows.

        Along a chain of steps every version of the parameter has to allow it.
        """
        readers: dict[Tensor, list[Node]] = {}
        for node in self.nodes:
            for argument in node.arguments:
                readers.setdefault(self.resolved(argument), []).append(node)
        out = set()
        for key in parameters:
            tensor: Tensor | None = self.old.inputs.get(key)
            if tensor is None or tensor.rank != 1:
                continue
            last = self.resolved(self.outputs[key])
            while tensor is not None and tensor is not last:
                tensor = self._next_row(tensor, readers)
            if tensor is last and all(self._stacks(n, readers) for n in readers.get(last, ())):
                out.add(key)
        return out

    def _next_row(self, tensor: Tensor, readers: Mapping[Tensor, list[Node]]) -> Tensor | None:
        updated = None
        for node in readers.get(tensor, []):
            if self._stacks(node, readers) or (
                node.op_type == "Gemm" and node.inputs[2:] == (tensor,)
            ):
                continue
            subtracts = node.op_type == "Sub" and node.inputs[0] is tensor
            if updated is not None or not subtracts or not self.row_sums(node.inputs[1]):
                return None
            updated = node.outputs[0]
        return updated

    def _stacks(self, node: Node, readers: Mapping[Tensor, list[Node]]) -> bool:
        """Whether a node concatenates vectors only for a Reshape, which accepts rows, too."""
        if node.op_type != "Concat" or node.attributes["axis"].i != 0:
            return False
        after = readers.get(node.outputs[0], [])
        return all(
            n.op_type == "Reshape" and n.inputs[1] is not None and n.inputs[1].constant is not None
            for n in after
        )

    def row_sums(self, tensor: Tensor | None) -> list[Tensor]:
        """The X of ReduceSum(X, axis 0) of matrices with a number of rows that is known, summed."""
        if tensor is None or self.uses[self.resolved(tensor)] != 1:
            return []
        added = self.source(tensor, "Add")
        if added is not None:
            left, right = map(self.row_sums, added.inputs)
            return [*left, *right] if left and right else []
        node = self.source(tensor, "ReduceSum")
        rows = None if node is None else patterns.summed_rows(node)
        return [] if rows is None else [rows]
