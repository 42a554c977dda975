"""Gradient rules of the operators that change a tensor's shape or move its parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from ortflex_core.autodiff import (
    Gradient,
    NodeView,
    Rules,
    dims,
    full,
    passed,
    positions,
    put_back,
    ranked,
    reshape_like,
    zeros_like,
)
from ortflex_core.graph import Ops, Tensor

RULES = Rules()

_INT64 = onnx.TensorProto.INT64
_END = np.iinfo(np.int64).max


def _ints(tensor: Tensor | None) -> list[int] | None:
    """The values of a constant list of integers, or None."""
    if tensor is None or tensor.constant is None:
        return None
    return [int(v) for v in tensor.constant.ravel()]


@RULES.rule("Reshape", "Flatten")
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


@RULES.rule("Transpose")
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
        return [g] * len(
            node.inputs
        )  # The cotangent is constant along the axis: every part may have all of it.
    lengths = [_length(op, x, axis) for x in node.inputs]
    whole = full(op, g, y)
    wanted = [k for k in range(len(lengths)) if node.needs(k)]
    if len(wanted) == 1:
        return [
            None if k not in wanted else _part(op, whole, axis, lengths[:k], lengths[k])
            for k in range(len(lengths))
        ]
    sizes = _joined(op, lengths)
    kinds = [(whole.dtype, x.shape) for x in node.inputs]
    at = {"axis": onnx.helper.make_attribute("axis", axis)}
    return node.trace.node("Split", [whole, sizes], at, outputs=len(lengths), types=kinds)


def _length(op: Ops, x: Tensor, axis: int) -> int | Tensor:
    """The size of one axis, as a number or, where it is not known yet, a tensor [1]."""
    size = None if x.shape is None else x.shape[axis]
    return size if isinstance(size, int) else op.Gather(op.Shape(x), op.constant([axis]))


def _joined(op: Ops, lengths: Sequence[int | Tensor]) -> Tensor:
    if all(isinstance(n, int) for n in lengths):
        return op.constant(list(lengths), _INT64)
    parts = [op.constant([n]) if isinstance(n, int) else n for n in lengths]
    return op.Concat(*parts, axis=0)


def _part(
    op: Ops, whole: Tensor, axis: int, before: Sequence[int | Tensor], size: int | Tensor
) -> Tensor:
    """The part of ``whole`` that comes after the lengths ``before``."""
    start = op.constant([sum(n for n in before if isinstance(n, int))])
    for n in before:
        if isinstance(n, Tensor):
            start = start + n
    if start.constant is not None and isinstance(size, int):
        end: Tensor = op.constant([int(start.constant[0]) + size])
    else:
        end = start + (op.constant([size]) if isinstance(size, int) else size)
    return op.Slice(whole, start, end, op.constant([axis]))


@RULES.rule("Split")
def _split(op: Ops, node: NodeView, *gs: Tensor | None) -> Sequence[Gradient]:
    # An unused part has the gradient 0; the other parts have one.
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
    """Zeros around the slice, where the graph's builder knows its place and steps are ±1."""
    x, starts, ends = node.inputs[0], _ints(node.inputs[1]), _ints(node.inputs[2])
    if starts is None or ends is None or x.rank is None:
        return None
    axes = list(range(len(starts))) if node.input(3) is None else _ints(node.input(3))
    steps = [1] * len(starts) if node.input(4) is None else _ints(node.input(4))
    if axes is None or steps is None or not set(steps) <= {1, -1}:
        return None
    pads = [0] * (2 * x.rank)
    turned = []
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
            turned.append(axis)
    if turned:
        each = len(turned)
        g = op.Slice(g, starts=[-1] * each, ends=[-_END] * each, axes=turned, steps=[-1] * each)
    return op.Pad(g, op.constant(pads)) if any(pads) else g


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
        cut = [(axis, a, -b if b else _END) for axis, a, b in sides if a or b]
        back = whole
        if cut:
            at, first, last = zip(*cut, strict=True)
            back = op.Slice(whole, starts=list(first), ends=list(last), axes=list(at))
    else:
        back = op("Pad", whole, op.Neg(amounts), None, axes)  # Negative amounts cut off.

    def to_value() -> Tensor:
        total = op.ReduceSum(whole, keepdims=0) - op.ReduceSum(back, keepdims=0)
        return reshape_like(op, total, node.inputs[2])

    return [back, None, to_value, None]


@RULES.rule("Tile", since=6)
def _tile(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, repeats, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if x.rank is None:
        return [put_back(op, full(op, g, y), op.Tile(positions(op, x), repeats), x), None]
    # [r0 n0, r1 n1] is [r0, n0, r1, n1], summed over the repetitions.
    counts = _ints(repeats)
    if counts is not None and all(isinstance(n, int) for n in x.shape):
        pairs = op.constant([n for pair in zip(counts, x.shape, strict=True) for n in pair])
    else:
        sides = [op.Unsqueeze(v, axes=[1]) for v in (repeats, dims(op, x))]
        pairs = op.Reshape(op.Concat(*sides, axis=1), op.constant([-1]))
    apart = op.Reshape(full(op, g, y), pairs)
    summed = op.ReduceSum(apart, axes=list(range(0, 2 * x.rank, 2)), keepdims=0)
    return [reshape_like(op, summed, x), None]


@RULES.rule("Trilu")
def _trilu(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    whole = full(op, g, node.outputs[0])
    return [op("Trilu", whole, *node.inputs[1:], upper=node.upper), None]
