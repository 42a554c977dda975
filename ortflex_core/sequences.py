"""Sequences and optional values, resolved while a graph is traced: they never enter one.

A sequence of known length is a tuple of tensors, so that an exporter's SplitToSequence and
SequenceAt are a Split, and what is put together from parts is their Concat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto

from ortflex_core.errors import GraphError
from ortflex_core.ops import Tensor, Trace


class TensorSequence(tuple[Tensor, ...]):
    """The elements of a sequence."""

    __slots__ = ()


Value = Any
"""A tensor or a :class:`TensorSequence`."""

Resolver = Callable[[Trace, Mapping[str, AttributeProto], Sequence[Value]], Sequence[Value]]


def resolve(
    trace: Trace, op_type: str, attributes: Mapping[str, AttributeProto], arguments: Sequence[Value]
) -> Sequence[Value]:
    """What an operator on sequences or optional values gives.

    Raises:
        GraphError: a position or a length is not known while the graph is built.
    """
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
    elements, place = _elements(arguments[0], "an element"), _position(arguments, 1, "SequenceAt")
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
    elements, axis = _elements(arguments[0], "the whole"), attributes["axis"].i
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
OPERATORS = frozenset({*RESOLVERS, "SequenceMap"})
"""The operators that are resolved while a graph is traced."""
