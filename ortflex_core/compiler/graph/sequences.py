"""Sequences and optional values are resolved while a graph is traced; no graph contains them.

A sequence of known length is a tuple of tensors, so an exporter's SplitToSequence and SequenceAt
become a Split, and joined parts a Concat. A tensor of unknown size that is split into equal parts
is kept whole: an element is read from it by Gather. So is a sequence to which a Loop appends a tensor
in each iteration: its elements are the rows of a result of the Loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import AttributeProto, TensorProto

from ortflex_core.compiler.graph.ops import Tensor, Trace
from ortflex_core.compiler.graph.sizes import known_sizes
from ortflex_core.kernel.errors import GraphError


class TensorSequence(tuple[Tensor, ...]):
    """The elements of a sequence."""

    __slots__ = ()


@attrs.frozen(eq=False)
class Parts:
    """The parts of a tensor, ``chunk`` rows each along an axis; the last may be shorter.

    Without ``keepdims`` each is one row, without that axis.
    """

    whole: Tensor
    axis: int
    chunk: int
    keepdims: bool

    def length(self) -> Tensor:
        """The number of parts."""
        return (self._rows() + (self.chunk - 1)) / self.chunk

    def at(self, place: Tensor) -> Tensor:
        """One part; as with SequenceAt, the run fails for an index out of range."""
        op = self.whole.trace.op
        place = op.Reshape(op.Cast(place, to=TensorProto.INT64), [] if not self.keepdims else [1])
        if self.chunk == 1:
            return op.Gather(self.whole, place, axis=self.axis)
        rows = self._rows()
        start = op.Where(place < 0, place + self.length(), place) * self.chunk
        start = op.Reshape(op.Where(start < 0, rows, start), [])
        end = op.Max(start + 1, op.Min(start + self.chunk, rows))
        return op.Gather(self.whole, op.Range(start, end, 1), axis=self.axis)

    def joined(self, axis: int, new_axis: bool) -> Tensor:
        """All parts concatenated along ``axis``, or stacked along a new one.

        Raises:
            GraphError: the result has neither the axes of the tensor that was split, nor one less.
        """
        rank = self.whole.rank
        if rank is not None and not self.keepdims and not new_axis:
            return self._merged(axis % (rank - 1))
        if rank is None or new_axis == self.keepdims:
            raise GraphError(
                f"ConcatFromSequence of parts of {self.whole!r}, whose number is not known while "
                "the graph is built, in another way than they were split"
            )
        own_axis, wanted_axis = self.axis % rank, axis % rank
        order = [k for k in range(rank) if k != own_axis]
        order.insert(wanted_axis, own_axis)
        if self.keepdims and own_axis != wanted_axis:
            raise GraphError(
                f"ConcatFromSequence along axis {wanted_axis} of parts along axis {own_axis}, whose "
                "number is not known while the graph is built"
            )
        return self.whole.trace.op.Transpose(self.whole, perm=order)

    def _merged(self, axis: int) -> Tensor:
        """The parts, without an axis of their own, one after the other along ``axis``."""
        op, rank = self.whole.trace.op, len(self.whole.shape or ())
        order = [k for k in range(rank) if k != self.axis % rank]
        order.insert(axis, self.axis % rank)
        turned = op.Transpose(self.whole, perm=order)
        sizes = op.Shape(turned)
        before, after = (op.Slice(sizes, [a], [b]) for a, b in ((0, axis), (axis + 2, rank)))
        return op.Reshape(turned, op.Concat(before, [-1], after, axis=0))

    def _rows(self) -> Tensor:
        op = self.whole.trace.op
        return op.Gather(op.Shape(self.whole), op.constant(self.axis), axis=0)


SEQUENCES = (TensorSequence, Parts)
Value = Any
"""A tensor, a :class:`TensorSequence` or :class:`Parts`."""

Resolver = Callable[[Trace, Mapping[str, AttributeProto], Sequence[Value]], Sequence[Value]]


def resolve(
    trace: Trace, op_type: str, attributes: Mapping[str, AttributeProto], arguments: Sequence[Value]
) -> Sequence[Value]:
    """The outputs of an operator on sequences or optional values; positions and lengths must be known."""
    return RESOLVERS[op_type](trace, attributes, arguments)


def _setting(attributes: Mapping[str, AttributeProto], name: str, default: int) -> int:
    return int(attributes[name].i) if name in attributes else default


def _elements(value: Value, what: str) -> TensorSequence:
    if not isinstance(value, TensorSequence):
        raise GraphError(
            f"{what} of a sequence whose length is not known while the graph is built; only "
            "sequences made inside the graph can be trained through"
        )
    return value


def _position(arguments: Sequence[Value], index: int, what: str, default: int | None = None) -> int:
    given = arguments[index] if len(arguments) > index else None
    if given is None and default is not None:
        return default
    if given is None or given.constant is None:
        raise GraphError(f"{what} at a position that is not known while the graph is built")
    return int(given.constant.item())


def _construct(trace: Trace, _: Any, arguments: Sequence[Value]) -> Sequence[Value]:
    return [TensorSequence(arguments)]


def _at(trace: Trace, _: Any, arguments: Sequence[Value]) -> Sequence[Value]:
    if isinstance(arguments[0], Parts):
        return [arguments[0].at(arguments[1])]
    elements = _elements(arguments[0], "an element")
    shapes = {e.shape for e in elements}
    if arguments[1].constant is None and len(shapes) == 1 and known_sizes(elements[0]) is not None:
        rows = [trace.op.Unsqueeze(e, axes=[0]) for e in elements]
        at = trace.op.Reshape(arguments[1], [])
        return [trace.op.Gather(trace.op.Concat(*rows, axis=0), at, axis=0)]
    place = _position(arguments, 1, "SequenceAt")
    if not -len(elements) <= place < len(elements):
        raise GraphError(f"SequenceAt: position {place} in a sequence of {len(elements)}")
    return [elements[place]]


def _insert(trace: Trace, _: Any, arguments: Sequence[Value]) -> Sequence[Value]:
    elements = list(_elements(arguments[0], "a longer form"))
    elements.insert(_position(arguments, 2, "SequenceInsert", len(elements)), arguments[1])
    return [TensorSequence(elements)]


def _erase(trace: Trace, _: Any, arguments: Sequence[Value]) -> Sequence[Value]:
    elements = list(_elements(arguments[0], "a shorter form"))
    del elements[_position(arguments, 1, "SequenceErase", -1)]
    return [TensorSequence(elements)]


def _length(trace: Trace, _: Any, arguments: Sequence[Value]) -> Sequence[Value]:
    if isinstance(arguments[0], Parts):
        return [arguments[0].length()]
    return [trace.constant(np.int64(len(_elements(arguments[0], "the length"))))]


def _split(
    trace: Trace, attributes: Mapping[str, AttributeProto], arguments: Sequence[Value]
) -> Sequence[Value]:
    x, given = arguments[0], arguments[1] if len(arguments) > 1 else None
    axis = _setting(attributes, "axis", 0)
    size = None if x.shape is None else x.shape[axis]
    sizes = None
    if given is not None and given.constant is not None and given.constant.ndim == 1:
        sizes = [int(n) for n in given.constant]
    elif isinstance(size, int) and (given is None or given.constant is not None):
        chunk = 1 if given is None else int(given.constant)
        sizes = [min(chunk, size - start) for start in range(0, size, chunk)]
    if sizes is None and (given is None or (given.constant is not None and given.rank == 0)):
        keepdims = given is not None or bool(_setting(attributes, "keepdims", 1))
        return [Parts(x, axis, 1 if given is None else int(given.constant), keepdims)]
    if sizes is None:
        raise GraphError(
            f"SplitToSequence of {x!r} into a number of parts that is not known while the graph "
            "is built"
        )
    parts: Sequence[Tensor] = (x,)
    if len(sizes) > 1:
        parts = trace.op.Split(x, sizes, axis=axis, outputs=len(sizes))
    if given is None and not _setting(attributes, "keepdims", 1):
        parts = [trace.op.Squeeze(p, axes=[axis]) for p in parts]
    return [TensorSequence(parts)]


def _concat(
    trace: Trace, attributes: Mapping[str, AttributeProto], arguments: Sequence[Value]
) -> Sequence[Value]:
    axis = attributes["axis"].i
    if isinstance(arguments[0], Parts):
        return [arguments[0].joined(axis, bool(_setting(attributes, "new_axis", 0)))]
    elements = _elements(arguments[0], "the whole")
    if _setting(attributes, "new_axis", 0):
        elements = TensorSequence(trace.op.Unsqueeze(e, axes=[axis]) for e in elements)
    return [trace.op.Concat(*elements, axis=axis)]


def _same(trace: Trace, _: Any, arguments: Sequence[Value]) -> Sequence[Value]:
    if not arguments:
        raise GraphError("an optional value that is empty cannot be trained through")
    return [arguments[0]]


def _there(trace: Trace, _: Any, arguments: Sequence[Value]) -> Sequence[Value]:
    return [trace.constant(np.array(bool(arguments) and arguments[0] is not None))]


RESOLVERS: Mapping[str, Resolver] = {
    "ConcatFromSequence": _concat,
    "Optional": _same,
    "OptionalGetElement": _same,
    "OptionalHasElement": _there,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _construct,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SplitToSequence": _split,
}
SEQUENCE_OPERATORS = frozenset({*RESOLVERS, "SequenceMap"})
"""The operators that are resolved while a graph is traced."""
