"""Small constants, computed while the graph is built: the arithmetic of shapes in exported files.

If a Concat of known sizes that Reshape or Resize reads is not folded, all later shapes are unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import numpy_helper

from ortflex_core.kernel.types import Array

LARGEST = 64
"""The largest number of elements of a folded constant: shapes, axes and scales, never weights."""

_Inputs = Sequence[Array | None]
_Attributes = Mapping[str, Any]


def fold(op_type: str, inputs: _Inputs, attributes: _Attributes) -> Array | None:
    """The value of an operator on small constants; None if the operator is not supported here.

    >>> fold("Concat", [np.array([1, 2]), np.array([3])], {"axis": 0})
    array([1, 2, 3])
    """
    rule = _RULES.get(op_type)
    if rule is None or any(i is not None and i.size > LARGEST for i in inputs):
        return None
    try:
        return rule(inputs, attributes)
    except (LookupError, TypeError, ValueError):  # malformed: inference reports the reason
        return None


def _axes(inputs: _Inputs, attributes: _Attributes) -> tuple[int, ...] | None:
    given = inputs[1] if len(inputs) > 1 else attributes.get("axes")
    return None if given is None else tuple(int(a) for a in given)


def _concat(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    parts = [i for i in inputs if i is not None]
    return np.concatenate(parts, axis=attributes["axis"])


def _gather(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    x, index = inputs
    assert x is not None
    assert index is not None
    return np.asarray(np.take(x, index, axis=attributes.get("axis", 0)))


def _unsqueeze(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    axes = _axes(inputs, attributes)
    assert inputs[0] is not None
    return None if axes is None else np.expand_dims(inputs[0], axes)


def _squeeze(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    assert inputs[0] is not None
    return np.squeeze(inputs[0], _axes(inputs, attributes))


def _reshape(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    x, shape = inputs
    if x is None or shape is None or (shape == 0).any():
        return None
    return x.reshape(tuple(map(int, shape)))


def _slice(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    x, starts, ends, axes, steps = (*inputs, None, None)[:5]
    if x is None or starts is None or ends is None:
        return None
    cuts = [slice(None)] * x.ndim
    along = range(len(starts)) if axes is None else axes
    by = [1] * len(starts) if steps is None else steps
    for axis, start, end, step in zip(along, starts, ends, by, strict=True):
        # numpy reads −1 as the last index; the standard clips an index before the first.
        stop = None if step < 0 and end < -x.shape[axis] else int(end)
        cuts[int(axis)] = slice(int(start), stop, int(step))
    return x[tuple(cuts)]


def _fold_arithmetic(function: Callable[[Array, Array], Array]) -> Callable[..., Array | None]:
    """Arithmetic of sizes: integers >= 0."""

    def rule(inputs: _Inputs, attributes: _Attributes) -> Array | None:
        a, b = inputs
        if a is None or b is None or a.dtype != np.int64 or b.dtype != np.int64:
            return None
        return None if (a < 0).any() or (b < 0).any() else np.asarray(function(a, b))

    return rule


def _quotient(a: Array, b: Array) -> Array:
    if (b == 0).any():
        raise ValueError("a division by zero is left to the runtime")
    return a // b


def _range(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    start, limit, delta = inputs
    assert start is not None
    assert limit is not None
    assert delta is not None
    if start.dtype.kind != "i" or not delta.item():
        return None
    numbers = range(int(start.item()), int(limit.item()), int(delta.item()))
    return np.array(numbers, start.dtype) if len(numbers) <= LARGEST else None


def _filled(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    (shape,) = inputs
    if shape is None or np.prod(shape, dtype=np.float64) > LARGEST or (shape < 0).any():
        return None
    value = attributes.get("value")
    one = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
    return np.full([int(d) for d in shape], one.item(), one.dtype)


def _expand(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    x, shape = inputs
    if x is None or shape is None or np.prod(shape, dtype=np.float64) * x.size > LARGEST:
        return None
    return x * np.ones([int(d) for d in shape], x.dtype) if x.dtype.kind == "i" else None


def _where(inputs: _Inputs, attributes: _Attributes) -> Array | None:
    condition, x, y = inputs
    if condition is None or x is None or y is None or x.dtype.kind != "i":
        return None
    return np.where(condition, x, y)


def _fold_comparison(function: Callable[[Array, Array], Array]) -> Callable[..., Array | None]:
    """Comparisons of integers, and logic on booleans."""

    def rule(inputs: _Inputs, attributes: _Attributes) -> Array | None:
        given = [i for i in inputs if i is not None and i.dtype.kind in "ib"]
        return np.asarray(function(*given)) if len(given) == len(inputs) else None

    return rule


def _fold_reduction(function: Callable[..., Array]) -> Callable[..., Array | None]:
    """A sum or product of sizes; axes are an input, or an attribute."""

    def rule(inputs: _Inputs, attributes: _Attributes) -> Array | None:
        x, axes = inputs[0], _axes(inputs, attributes)
        if x is None or x.dtype != np.int64 or axes == ():  # no axes: all, or none
            return None
        return np.asarray(function(x, axis=axes, keepdims=bool(attributes.get("keepdims", 1))))

    return rule


_RULES: Mapping[str, Callable[[_Inputs, _Attributes], Array | None]] = {
    "Concat": _concat,
    "Gather": _gather,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Slice": _slice,
    "Add": _fold_arithmetic(np.add),
    "Sub": _fold_arithmetic(np.subtract),
    "Mul": _fold_arithmetic(np.multiply),
    "Div": _fold_arithmetic(_quotient),
    "Min": _fold_comparison(lambda *many: functools.reduce(np.minimum, many)),
    "Max": _fold_comparison(lambda *many: functools.reduce(np.maximum, many)),
    "Range": _range,
    "ConstantOfShape": _filled,
    "Expand": _expand,
    "Where": _where,
    "Equal": _fold_comparison(np.equal),
    "Less": _fold_comparison(np.less),
    "LessOrEqual": _fold_comparison(np.less_equal),
    "Greater": _fold_comparison(np.greater),
    "GreaterOrEqual": _fold_comparison(np.greater_equal),
    "And": _fold_comparison(np.logical_and),
    "Or": _fold_comparison(np.logical_or),
    "Not": _fold_comparison(np.logical_not),
    "ReduceSum": _fold_reduction(np.sum),
    "ReduceProd": _fold_reduction(np.prod),
}
