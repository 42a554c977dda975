"""Helpers for gradient rules: expand cotangents, sum over broadcast axes, restore shapes.

Sizes that are known while the graph is built become constants; others are computed when the graph
runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

from ortflex_core.compiler.graph.sizes import count_to, dims
from ortflex_core.kernel.types import Shape, same_dim, same_shape

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor

_INT64 = onnx.TensorProto.INT64


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
    """The constant target for the result ``shape``; None if it has to be computed when the graph runs.

    One size may be unknown. No size may be 0, which Reshape reads as "copy this size".
    """
    sizes = [d if isinstance(d, int) else -1 for d in shape]
    if sizes.count(-1) > 1 or 0 in sizes:
        return None
    return op.constant(sizes, _INT64)


def positions(op: Ops, like: Tensor) -> Tensor:
    """The index of every element of ``like`` in the flattened tensor, as int64.

    An operator that only moves elements moves the positions in the same way. From the moved positions
    :func:`put_back` knows the place of each element of a cotangent.
    """
    return op.Reshape(count_to(op, op.Size(like)), dims(op, like))


def put_back(
    op: Ops, gradient: Tensor, places: Tensor, like: Tensor, *, repeated: bool = True
) -> Tensor:
    """Add each element of a full-size ``gradient`` to zeros of the shape of ``like`` at its position.

    ``repeated=False`` promises that no position occurs twice.
    """
    values, index = op.Reshape(gradient, [-1]), op.Reshape(places, [-1])
    zeros = op.Expand(op.constant(0.0, gradient.dtype), op.Reshape(op.Size(like), [-1]))
    if repeated:
        added = add_at(op, zeros, index, values)
    else:
        added = op.ScatterElements(zeros, index, values, axis=0)
    return reshape_like(op, added, like)


def add_at(op: Ops, zeros: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add ``values`` to ``zeros`` at the places ``index`` of the last axis; the other axes are equal."""
    if op.opset >= 16:
        return op.ScatterElements(zeros, index, values, axis=-1, reduction="add")
    # This opset has no scatter operator that adds; a product with a matrix of zeros and ones does
    # the same.
    every = count_to(op, op.Gather(op.Shape(zeros), -1, axis=0))
    hits = op.Equal(op.Unsqueeze(index, axes=[-1]), every)
    rows = op.MatMul(op.Unsqueeze(values, axes=[-2]), op.Cast(hits, to=values.dtype))
    return op.Squeeze(rows, axes=[-2])


def unbroadcast(op: Ops, gradient: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over the axes along which ``like`` was broadcast.

    The result has the shape of ``like`` or broadcasts to it. If the shapes are not known while the graph
    is built, the axes are computed when it runs.

    >>> from ortflex_core import Trace
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
    for k, (own, wanted) in enumerate(zip(have[extra:], aligned, strict=True), start=extra):
        if own == 1 or same_dim(own, wanted):
            continue
        if wanted != 1:
            return _unbroadcast_at_run_time(op, gradient, like)
        axes.append(k)
    if not axes:
        return gradient
    total = op.ReduceSum(gradient, axes=axes, keepdims=0 if len(axes) == extra else 1)
    if extra and len(axes) > extra:
        total = op.Squeeze(total, axes=list(range(extra)))
    return total


def _unbroadcast_at_run_time(op: Ops, gradient: Tensor, like: Tensor) -> Tensor:
    """Compare the two shapes inside the graph and sum over the axes that differ.

    The gradient is first expanded to its full shape, so an axis of size 1 in ``like`` that has
    another size in the gradient was broadcast.
    """
    target = dims(op, like)
    full_gradient = op.Expand(gradient, target)
    sizes = op.Shape(full_gradient)
    missing = op.Size(sizes) - op.Size(target)
    ones = op.Expand(op.constant([1]), op.Reshape(missing, [1]))
    padded = op.Concat(ones, target, axis=0)
    different = op.Cast(op.Not(op.Equal(sizes, padded)), to=_INT64)
    axes = op.Reshape(op.NonZero(different), [-1])
    summed = op.ReduceSum(full_gradient, axes=axes, keepdims=1, noop_with_empty_axes=1)
    kind = [(gradient.dtype, like.shape)]
    return gradient.trace.node("Reshape", [summed, target], {}, types=kind)[0]
