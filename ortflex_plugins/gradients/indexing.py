"""Gradient rules of the operators that read or write elements at given places.

A place that is read twice gets the sum of both cotangents: ScatterND and ScatterElements compute
it from opset 16 on, :func:`~ortflex_core.put_back` in every opset.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    count_to,
    dims,
    full,
    passed,
    positions,
    put_back,
    size_of,
    zeros_like,
)

RULES = Rules()

RULES.not_differentiable("NonZero")


@RULES.rule("Gather")
def _gather(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, index = node.inputs
    whole = full(op, g, node.outputs[0])
    if x.rank is None or index.rank is None or op.opset < 16:
        moved = op.Gather(positions(op, x), index, axis=node.axis)
        return [put_back(op, whole, moved, x), None]
    axis = node.axis % x.rank
    places = op.Unsqueeze(op.Cast(index, to=TensorProto.INT64), axes=[-1])
    if axis == 0:
        return [op.ScatterND(zeros_like(op, x), places, whole, reduction="add"), None]
    # ScatterND writes along the first axes, so the gathered axis becomes the first one and returns.
    order = [axis, *(k for k in range(x.rank) if k != axis)]
    zeros = op.Transpose(zeros_like(op, x), perm=order)
    read = range(axis, axis + index.rank)
    front = [*read, *(k for k in range(len(read) + x.rank - 1) if k not in read)]
    added = op.ScatterND(zeros, places, op.Transpose(whole, perm=front), reduction="add")
    return [op.Transpose(added, perm=[int(k) for k in np.argsort(order)]), None]


@RULES.rule("GatherElements")
def _gather_elements(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, index = node.inputs
    whole = full(op, g, node.outputs[0])
    if op.opset < 16:
        moved = op.GatherElements(positions(op, x), index, axis=node.axis)
        return [put_back(op, whole, moved, x), None]
    zeros = zeros_like(op, x)
    return [op.ScatterElements(zeros, index, whole, axis=node.axis, reduction="add"), None]


@RULES.rule("GatherND")
def _gather_nd(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, index = node.inputs
    whole = full(op, g, node.outputs[0])
    if op.opset < 16 or node.batch_dims:
        moved = op.GatherND(positions(op, x), index, batch_dims=node.batch_dims)
        return [put_back(op, whole, moved, x), None]
    return [op.ScatterND(zeros_like(op, x), index, whole, reduction="add"), None]


@RULES.rule("ScatterElements", "ScatterND", attributes=("axis",))
def _scatter(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Without a reduction, an element that is written twice has no defined value and gets no gradient."""
    data, _, updates = node.inputs
    y, reduction = node.outputs[0], node.reduction or "none"
    if reduction == "mul":
        return _scatter_product(op, node, full(op, g, y))
    if reduction in ("max", "min"):
        return _scatter_extreme(op, node, full(op, g, y))

    def to_data() -> Tensor:
        if reduction == "add":
            return passed(op, g, y, data)
        return _written(op, node, full(op, g, y), zeros_like(op, updates), "none")

    return [to_data, None, lambda: _read(op, node, full(op, g, y))]


def _written(op: Ops, node: NodeView, data: Tensor, updates: Tensor, reduction: str) -> Tensor:
    """Write to ``data`` at the node's places, in the node's mode."""
    settings = {"axis": node.axis} if node.op_type == "ScatterElements" else {}
    if reduction != "none":
        settings["reduction"] = reduction
    result: Tensor = op(node.op_type, data, node.inputs[1], updates, **settings)
    return result


def _read(op: Ops, node: NodeView, data: Tensor) -> Tensor:
    """The values of ``data`` at the node's places, one for each update."""
    if node.op_type == "ScatterElements":
        return op.GatherElements(data, node.inputs[1], axis=node.axis)
    return op.GatherND(data, node.inputs[1])


def _scatter_product(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient of a factor is the product of the others; it is right if some of them are 0."""
    data, _, updates = node.inputs
    zero = op.Equal(updates, 0.0)
    nonzero = op.Where(zero, 1.0, updates)

    def to_updates() -> Tensor:
        own_zero = op.Cast(zero, to=g.dtype)
        zeros = _read(op, node, _written(op, node, zeros_like(op, data), own_zero, "add"))
        others = _read(op, node, g * _written(op, node, data, nonzero, "mul")) / nonzero
        return op.Where(op.Equal(zeros, own_zero), others, 0.0)

    def to_data() -> Tensor:
        ones = full(op, op.constant(1.0, g.dtype), data)
        return g * _written(op, node, ones, updates, "mul")

    return [to_data, None, to_updates]


def _scatter_extreme(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Equal extrema share the gradient evenly."""
    data, _, updates = node.inputs
    y = node.outputs[0]
    kept = op.Cast(op.Equal(data, y), to=g.dtype)
    taken = op.Cast(op.Equal(updates, _read(op, node, y)), to=g.dtype)
    share = g / _written(op, node, kept, taken, "add")
    return [lambda: share * kept, None, lambda: _read(op, node, share) * taken]


@RULES.rule("OneHot")
def _one_hot(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The on-value and the off-value get the sums of the gradients at their positions."""
    index, depth = node.inputs[:2]
    whole = full(op, g, node.outputs[0])

    def to_values() -> Tensor:
        hot = op.OneHot(index, depth, op.constant([0.0, 1.0], g.dtype), axis=node.axis)
        on = op.ReduceSum(whole * hot, keepdims=0)
        off = op.ReduceSum(whole, keepdims=0) - on
        return op.Concat(*(op.Unsqueeze(v, axes=[0]) for v in (off, on)), axis=0)

    return [None, None, to_values]


@RULES.rule("Range", attributes=("stash_type",))
def _range(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Element k is start + k·delta. The limit only sets the number of elements and has no gradient."""
    whole = full(op, g, node.outputs[0])

    def to_delta() -> Tensor:
        steps = op.Cast(count_to(op, op.Size(whole)), to=g.dtype)
        return op.ReduceSum(whole * steps, keepdims=0)

    return [lambda: op.ReduceSum(whole, keepdims=0), None, to_delta]


@RULES.rule("TopK", since=10, attributes=("largest", "sorted"))
def _top_k(op: Ops, node: NodeView, g: Tensor, _: Tensor | None) -> Sequence[Gradient]:
    values, index = node.outputs
    zeros = zeros_like(op, node.inputs[0])
    return [op.ScatterElements(zeros, index, full(op, g, values), axis=node.axis), None]


@RULES.rule("Compress")
def _compress(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, condition = node.inputs
    moved = op.Compress(positions(op, x), condition, axis=node.axis)
    return [put_back(op, full(op, g, node.outputs[0]), moved, x, repeated=False), None]


@RULES.rule("Unique", attributes=("sorted",))
def _unique(op: Ops, node: NodeView, g: Tensor | None, *_: Tensor | None) -> Sequence[Gradient]:
    """The first of several equal elements gets the whole gradient, because the output contains it."""
    if g is None:
        return [None]
    x, first = node.inputs[0], node.more_outputs(2)[1]
    places = positions(op, x)
    if node.axis is None:
        places = op.Reshape(places, [-1])
    moved = op.Gather(places, first, axis=node.axis or 0)
    return [put_back(op, full(op, g, node.outputs[0]), moved, x, repeated=False)]


@RULES.rule("TensorScatter")
def _tensor_scatter(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Gradients at positions that were written flow to the update. All others flow to the cache."""
    cache, update, starts = node.inputs[0], node.inputs[1], node.input(2)
    whole = full(op, g, node.outputs[0])
    rank = update.rank
    if rank is None:
        raise NoGradientRule("with an update of unknown rank")
    axis = node.axis % rank

    def to_update() -> Tensor:
        places = count_to(op, size_of(op, update, axis))
        places = op.Unsqueeze(places, axes=[k for k in range(rank) if k != axis])
        if starts is not None:
            begin = op.Cast(starts, to=TensorProto.INT64)
            places = places + op.Unsqueeze(begin, axes=list(range(1, rank)))
        if node.mode == "circular":
            places = op.Mod(places, size_of(op, cache, axis))
        return op.GatherElements(whole, op.Expand(places, dims(op, update)), axis=axis)

    def to_cache() -> Tensor:
        zeros = zeros_like(op, update)
        return op.TensorScatter(whole, zeros, starts, axis=node.axis, mode=node.mode)

    return [to_cache, to_update, None]
