"""Helpers for gradient rules: expand cotangents, sum over broadcast axes, restore shapes.

Sizes that are known while the graph is built become constants; only the others are computed when it
runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from ortflex_core.types import Shape, same_dim, same_shape

if TYPE_CHECKING:
    from ortflex_core.graph.ops import Ops, Tensor

_INT64 = onnx.TensorProto.INT64


def dims(op: Ops, like: Tensor) -> Tensor:
    """The shape of a tensor as an int64 tensor, constant where it is known."""
    if like.shape is not None and all(isinstance(d, int) for d in like.shape):
        return op.constant(list(like.shape), _INT64)
    return op.Shape(like)


def full(op: Ops, gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient expanded to the whole shape of ``like``."""
    if same_shape(gradient.shape, like.shape):
        return gradient
    kind = [(gradient.dtype, like.shape)]
    return gradient.trace.node("Expand", [gradient, dims(op, like)], {}, types=kind)[0]


def passed(op: Ops, gradient: Tensor, output: Tensor, argument: Tensor) -> Tensor:
    """The cotangent of an ``argument`` that enters ``output`` with the factor 1.

    The gradient of a broadcast argument is a sum over all copies, so the cotangent must then have
    its full shape; otherwise it may stay small.
    """
    if same_shape(output.shape, argument.shape):
        return gradient
    return full(op, gradient, output)


def ranked(op: Ops, gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient with as many axes as ``like``, some of which may still be of size 1."""
    if gradient.rank is not None and gradient.rank == like.rank:
        return gradient
    return full(op, gradient, like)


def zeros_like(op: Ops, like: Tensor) -> Tensor:
    """Zeros of the shape and type of ``like``."""
    return full(op, op.constant(0.0, like.dtype), like)


def reshape_like(op: Ops, gradient: Tensor, like: Tensor) -> Tensor:
    """A full-size gradient in the shape of ``like``, which has the same number of elements."""
    if same_shape(gradient.shape, like.shape):
        return gradient
    target = None if like.shape is None else _reshape_target(op, like.shape)
    settings = {}
    if target is None:
        target = dims(op, like)
        if op.opset >= 14:
            settings["allowzero"] = onnx.helper.make_attribute("allowzero", 1)
    kind = [(gradient.dtype, like.shape)]
    return gradient.trace.node("Reshape", [gradient, target], settings, types=kind)[0]


def _reshape_target(op: Ops, shape: Shape) -> Tensor | None:
    """The constant that makes Reshape give ``shape``; None if it has to be computed when the graph runs.

    One size may be unknown. A size of 0 may not: Reshape reads it as "copy this size".
    """
    sizes = [d if isinstance(d, int) else -1 for d in shape]
    if sizes.count(-1) > 1 or 0 in sizes:
        return None
    return op.constant(sizes, _INT64)


def positions(op: Ops, like: Tensor) -> Tensor:
    """The index of every element of ``like`` in the flattened tensor, as int64.

    An operator that only moves elements moves the positions in the same way: the moved positions
    tell :func:`put_back` where each element of a cotangent belongs.
    """
    count = op.Range(op.constant(0), op.Size(like), op.constant(1))
    return op.Reshape(count, dims(op, like))


def put_back(
    op: Ops, gradient: Tensor, places: Tensor, like: Tensor, *, repeated: bool = True
) -> Tensor:
    """Add each element of a full-size ``gradient`` to zeros of the shape of ``like`` at its position.

    ``repeated=False`` promises that no position occurs twice.
    """
    flat = op.constant([-1])
    values, index = op.Reshape(gradient, flat), op.Reshape(places, flat)
    size = op.Reshape(op.Size(like), flat)
    if repeated and op.opset < 16:
        # This opset has no scatter operator that adds; a product with a matrix of zeros and ones
        # does the same.
        places_of = op.Range(op.constant(0), op.Size(like), op.constant(1))
        hits = op.Equal(op.Unsqueeze(index, axes=[1]), op.Unsqueeze(places_of, axes=[0]))
        added = op.MatMul(values, op.Cast(hits, to=gradient.dtype))
    else:
        zeros = op.Expand(op.constant(0.0, gradient.dtype), size)
        settings = {"reduction": "add"} if repeated else {}
        added = op.ScatterElements(zeros, index, values, axis=0, **settings)
    return reshape_like(op, added, like)


def unbroadcast(op: Ops, gradient: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over the axes along which ``like`` was broadcast.

    The result has the shape of ``like`` or still broadcasts to it. Where the shapes are not known
    when the graph is built, the axes are found when it runs.

    >>> from ortflex_core.graph.ops import Trace
    >>> trace = Trace({"": 17})
    >>> bias, gradient = trace.input("b", "f4", (1, 3)), trace.input("g", "f4", ("N", 3))
    >>> unbroadcast(trace.op, gradient, bias)
    <ReduceSum: float32[1, 3]>
    """
    have, want = gradient.shape, like.shape
    if have is None or want is None:
        return _unbroadcast_at_run_time(op, gradient, like)
    extra = max(0, len(have) - len(want))
    axes = list(range(extra))
    aligned = want[max(0, len(want) - len(have)) :]
    for k, (h, w) in enumerate(zip(have[extra:], aligned, strict=True), start=extra):
        if h == 1 or same_dim(h, w):
            continue
        if w != 1:
            return _unbroadcast_at_run_time(op, gradient, like)
        axes.append(k)
    if not axes:
        return gradient
    kept = op.ReduceSum(gradient, axes=axes, keepdims=0 if len(axes) == extra else 1)
    if extra and len(axes) > extra:
        kept = op.Squeeze(kept, axes=list(range(extra)))
    return kept


def _unbroadcast_at_run_time(op: Ops, gradient: Tensor, like: Tensor) -> Tensor:
    """Compare the two shapes inside the graph and sum over the axes that differ.

    The gradient is first expanded to its full shape, so an axis of size 1 in ``like`` that has
    another size in the gradient was broadcast.
    """
    target = dims(op, like)
    whole = op.Expand(gradient, target)
    have = op.Shape(whole)
    missing = op.Size(have) - op.Size(target)
    ones = op.Expand(op.constant([1]), op.Reshape(missing, op.constant([1])))
    padded = op.Concat(ones, target, axis=0)
    different = op.Cast(op.Not(op.Equal(have, padded)), to=_INT64)
    axes = op.Reshape(op.NonZero(different), op.constant([-1]))
    summed = op.ReduceSum(whole, axes=axes, keepdims=1, noop_with_empty_axes=1)
    kind = [(gradient.dtype, like.shape)]
    return gradient.trace.node("Reshape", [summed, target], {}, types=kind)[0]
