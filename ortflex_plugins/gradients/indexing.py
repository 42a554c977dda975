"""Gradient rules of the operators that read or write at given places.

A place read twice gets both cotangents, so the way back adds: ScatterND and ScatterElements do
that from opset 16 on, :func:`~ortflex_core.cotangents.put_back` everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortflex_core.autodiff import Gradient, NodeView, Rules
from ortflex_core.cotangents import full, passed, positions, put_back, zeros_like
from ortflex_core.errors import NoGradientRule
from ortflex_core.ops import Ops, Tensor

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
    places = op.Unsqueeze(index, axes=[-1])
    if axis == 0:
        return [op.ScatterND(zeros_like(op, x), places, whole, reduction="add"), None]
    # ScatterND writes along the first axes: bring the gathered one there and back.
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


@RULES.rule("ScatterElements", "ScatterND")
def _scatter(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Without a reduction, places written twice have no defined value: nothing is owed to them."""
    _, index, updates = node.inputs
    at = {"axis": node.axis} if node.op_type == "ScatterElements" else {}
    gather = "GatherElements" if node.op_type == "ScatterElements" else "GatherND"
    y = node.outputs[0]
    if node.reduction not in (None, "none", "add"):
        raise NoGradientRule(f"with reduction={node.reduction!r}")

    def to_data() -> Tensor:
        if node.reduction == "add":
            return passed(op, g, y, node.inputs[0])
        return op(node.op_type, full(op, g, y), index, zeros_like(op, updates), **at)  # type: ignore[no-any-return]

    return [to_data, None, lambda: op(gather, full(op, g, y), index, **at)]


@RULES.rule("OneHot")
def _one_hot(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Only the two values vary: off gets what lies outside the ones, on what lies on them."""
    index, depth = node.inputs[:2]
    whole = full(op, g, node.outputs[0])

    def to_values() -> Tensor:
        hot = op.OneHot(index, depth, op.constant([0.0, 1.0], g.dtype), axis=node.axis)
        on = op.ReduceSum(whole * hot, keepdims=0)
        off = op.ReduceSum(whole, keepdims=0) - on
        return op.Concat(*(op.Unsqueeze(v, axes=[0]) for v in (off, on)), axis=0)  # type: ignore[no-any-return]

    return [None, None, to_values]


@RULES.rule("Range")
def _range(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Element k is start + k·delta; the limit decides only how many there are."""
    whole = full(op, g, node.outputs[0])

    def to_delta() -> Tensor:
        steps = op.Range(op.constant(0), op.Size(whole), op.constant(1))
        return op.ReduceSum(whole * op.Cast(steps, to=g.dtype), keepdims=0)  # type: ignore[no-any-return]

    return [lambda: op.ReduceSum(whole, keepdims=0), None, to_delta]


@RULES.rule("TopK", since=10)
def _top_k(op: Ops, node: NodeView, g: Tensor, _: Tensor | None) -> Sequence[Gradient]:
    values, index = node.outputs
    zeros = zeros_like(op, node.inputs[0])
    return [op.ScatterElements(zeros, index, full(op, g, values), axis=node.axis), None]
