"""Gradient rules of the operators that change a tensor's shape or move its parts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np
import onnx

from ortflex_core import (
    Gradient,
    NodeView,
    Ops,
    Rules,
    Tensor,
    dims,
    full,
    passed,
    positions,
    put_back,
    ranked,
    reshape_like,
    size_vector,
    zeros_like,
)

RULES = Rules()

_END = np.iinfo(np.int64).max


def _ints(tensor: Tensor | None) -> list[int] | None:
    """The values of a constant list of integers, or None."""
    if tensor is None or tensor.constant is None:
        return None
    return [int(v) for v in tensor.constant.ravel()]


@RULES.rule("Reshape", "Flatten", attributes=("allowzero", "axis"))
def _reshape(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    if g.rank == 0:
        return [g, None]
    return [reshape_like(op, full(op, g, node.outputs[0]), node.inputs[0]), None]


@RULES.rule("Squeeze", "Unsqueeze")
def _squeeze(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    axes = node.axes if node.input(1) is None else _ints(node.input(1))
    if g.rank == 0 or axes is None:
        return _reshape(op, node, g)
    back = "Unsqueeze" if node.op_type == "Squeeze" else "Squeeze"
    return [op(back, ranked(op, g, node.outputs[0]), axes=list(axes)), None]


@RULES.rule("Transpose", attributes=("perm",))
def _transpose(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    if g.rank == 0:
        return [g]
    back = None if node.perm is None else [int(k) for k in np.argsort(node.perm)]
    return [op.Transpose(ranked(op, g, node.outputs[0]), perm=back)]


@RULES.rule("Expand")
def _expand(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    return [passed(op, g, node.outputs[0], node.inputs[0]), None]


@RULES.rule("Concat")
def _concat(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    y, axis = node.outputs[0], node.axis
    if len(node.inputs) == 1:
        return [g]
    if g.rank == 0 or (g.shape is not None and g.rank == y.rank and g.shape[axis] == 1):
        # The cotangent is constant along the axis, so every part may have all of it.
        return [g] * len(node.inputs)
    lengths = [size_vector(op, x, axis) for x in node.inputs]
    whole = full(op, g, y)
    wanted = [k for k in range(len(lengths)) if node.needs(k)]
    if len(wanted) == 1:
        (k,) = wanted
        start = functools.reduce(operator.add, lengths[:k], op.constant([0]))
        part = op.Slice(whole, start, start + lengths[k], [axis])
        return [part if k in wanted else None for k in range(len(lengths))]
    sizes = op.Concat(*lengths, axis=0)
    kinds = [(whole.dtype, x.shape) for x in node.inputs]
    attributes = {"axis": onnx.helper.make_attribute("axis", axis)}
    return node.trace.node("Split", [whole, sizes], attributes, outputs=len(lengths), types=kinds)


@RULES.rule("Split", attributes=("axis", "num_outputs"))
def _split(op: Ops, node: NodeView, *gs: Tensor | None) -> Sequence[Gradient]:
    # A part that nothing reads has the gradient 0.
    parts = [
        zeros_like(op, y) if g is None else full(op, g, y)
        for g, y in zip(gs, node.outputs, strict=True)
    ]
    return [parts[0] if len(parts) == 1 else op.Concat(*parts, axis=node.axis), None]


@RULES.rule("Slice", since=10)
def _slice(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, whole = node.inputs[0], full(op, g, node.outputs[0])
    back = _slice_by_pad(op, node, whole)
    if back is None:
        moved = op.Slice(positions(op, x), *node.inputs[1:])
        back = put_back(op, whole, moved, x, repeated=False)
    return [back, None, None, None, None]


def _slice_by_pad(op: Ops, node: NodeView, g: Tensor) -> Tensor | None:
    """The gradient with zeros around it; None unless all sizes are known and all steps are ±1."""
    x, starts, ends = node.inputs[0], _ints(node.inputs[1]), _ints(node.inputs[2])
    if starts is None or ends is None or x.rank is None:
        return None
    axes = list(range(len(starts))) if node.input(3) is None else _ints(node.input(3))
    steps = [1] * len(starts) if node.input(4) is None else _ints(node.input(4))
    if axes is None or steps is None or not set(steps) <= {1, -1}:
        return None
    pads = [0] * (2 * x.rank)
    reversed_axes = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        if not isinstance(size, int):
            return None
        taken = range(size)[start:end:step]
        if not taken:
            return None
        pads[axis % x.rank] = min(taken)
        pads[x.rank + axis % x.rank] = size - 1 - max(taken)
        if step < 0:
            reversed_axes.append(axis)
    if reversed_axes:
        n = len(reversed_axes)
        g = op.Slice(g, starts=[-1] * n, ends=[-_END] * n, axes=reversed_axes, steps=[-1] * n)
    return op.Pad(g, pads) if any(pads) else g


@RULES.rule("Pad", since=11)
def _pad(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, amounts, axes = node.inputs[0], node.inputs[1], node.input(3)
    whole = full(op, g, node.outputs[0])
    if node.mode != "constant":
        moved = op("Pad", positions(op, x), amounts, None, axes, mode=node.mode)
        return [put_back(op, whole, moved, x), None, None, None]
    pads = _ints(amounts)
    places = range(len(pads) // 2) if pads is not None and axes is None else _ints(axes)
    if pads is not None and places is not None and min(pads, default=0) >= 0:
        half = len(pads) // 2
        sides = zip(places, pads[:half], pads[half:], strict=True)
        cuts = [(a, -b if b else _END, axis) for axis, a, b in sides if a or b]
        back = op.Slice(whole, *map(list, zip(*cuts, strict=True))) if cuts else whole
    else:
        back = op("Pad", whole, op.Neg(amounts), None, axes)  # Negative amounts remove elements.

    def to_value() -> Tensor:
        total = op.ReduceSum(whole, keepdims=0) - op.ReduceSum(back, keepdims=0)
        return reshape_like(op, total, node.inputs[2])

    return [back, None, to_value, None]


@RULES.rule("Tile", since=6)
def _tile(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, repeats, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if x.rank is None:
        return [put_back(op, full(op, g, y), op.Tile(positions(op, x), repeats), x), None]
    # [r0 n0, r1 n1] as [r0, n0, r1, n1], summed over the repetitions.
    sides = [op.Unsqueeze(v, axes=[1]) for v in (repeats, dims(op, x))]
    pairs = op.Reshape(op.Concat(*sides, axis=1), [-1])
    repetitions = op.Reshape(full(op, g, y), pairs)
    summed = op.ReduceSum(repetitions, axes=list(range(0, 2 * x.rank, 2)), keepdims=0)
    return [reshape_like(op, summed, x), None]


@RULES.rule("Trilu")
def _trilu(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    whole = full(op, g, node.outputs[0])
    return [op("Trilu", whole, *node.inputs[1:], upper=node.upper), None]


@RULES.rule("ReverseSequence")
def _reverse_sequence(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient is reversed in the same way."""
    whole = full(op, g, node.outputs[0])
    axes = {"batch_axis": node.batch_axis, "time_axis": node.time_axis}
    return [op.ReverseSequence(whole, node.inputs[1], **axes), None]
