"""Gradient rules of quantization: a gradient passes straight through rounding; saturation stops it.

Quantized values are integers that stand for real numbers. A pair of QuantizeLinear and
DequantizeLinear passes the gradient where x / scale + zero is in the range of the type, and the
gradient of the scale comes from the error of rounding. A Clip of the integers between both makes the
range smaller, as in torch's FakeQuantize with quant_min and quant_max.

Source: Bengio, Léonard, Courville, arXiv:1308.3432 (the straight-through estimator); Esser et al.,
arXiv:1902.08153, eq. 3 (the gradient of the scale, which is also that of torch's fake quantization).
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
    dims,
    full,
    numpy_dtype,
)

RULES = Rules()
RULES.straight_through("QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")
# Between QuantizeLinear and DequantizeLinear: the range of a fake quantization, and moved elements.
RULES.carries_integers(
    *("Clip", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand"),
    *("Slice", "Gather", "GatherElements", "GatherND", "Split", "Tile", "DepthToSpace"),
    *("SpaceToDepth", "MaxPool", "Pad", "Resize"),
)

_RANGES: dict[int, tuple[int, int]] = {
    int(dtype): (int(np.iinfo(numpy_dtype(dtype)).min), int(np.iinfo(numpy_dtype(dtype)).max))
    for dtype in (TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16)
} | {int(TensorProto.UINT4): (0, 15), int(TensorProto.INT4): (-8, 7)}
_ENDS: dict[int, float] = {
    TensorProto.FLOAT8E4M3FN: 448 * (1 + 0.5 / 14),
    TensorProto.FLOAT8E4M3FNUZ: 240 * (1 + 0.5 / 15),
    TensorProto.FLOAT8E5M2: 57344 * (1 + 0.5 / 7),
    TensorProto.FLOAT8E5M2FNUZ: 57344 * (1 + 0.5 / 7),
}
"""What rounds to the largest float of one byte without being clipped: up to half a step above it."""


def _per_axis(node: NodeView) -> bool:
    scale = node.inputs[1]
    return bool(scale.rank == 1 and scale.shape != (1,))


def _spread(op: Ops, node: NodeView, values: Tensor) -> Tensor:
    """Scales or zero points (one per tensor, per index of an axis, or per block) that broadcast with x."""
    x, scale = node.inputs[:2]
    if x.rank is None or scale.rank is None:
        raise NoGradientRule("with an input of unknown rank")
    if node.block_size:
        # DequantizeLinear of ones gives the scales in the right places.
        one = op.Expand(op.constant(1, TensorProto.INT8), dims(op, x))
        return op.DequantizeLinear(one, values, axis=node.axis, block_size=node.block_size)
    trailing = list(range(1, x.rank - node.axis % x.rank)) if _per_axis(node) else []
    return op.Unsqueeze(values, axes=trailing) if trailing else values


def _to_scale(op: Ops, node: NodeView, contribution: Tensor) -> Tensor:
    """The gradient of the scales from the contributions of all elements."""
    if node.block_size:
        return _sum_of_blocks(op, node, contribution)
    rank = node.inputs[0].rank
    if not _per_axis(node) or rank == 1:
        return contribution
    axes = [k for k in range(rank) if k != node.axis % rank]
    return op.ReduceSum(contribution, axes=axes, keepdims=0)


def _sum_of_blocks(op: Ops, node: NodeView, contribution: Tensor) -> Tensor:
    """The sums over the elements of each block; the last block may have fewer elements."""
    x, scale = node.inputs[:2]
    if x.rank is None or scale.shape is None:
        raise NoGradientRule("by the scales of blocks of unknown shape")
    axis, size = node.axis % x.rank, node.block_size
    count, length = scale.shape[axis], None if x.shape is None else x.shape[axis]
    if not (isinstance(count, int) and isinstance(length, int)):
        raise NoGradientRule("by the scales of blocks of unknown shape")
    if count * size > length:
        pads = [0] * (2 * x.rank)
        pads[x.rank + axis] = count * size - length
        contribution = op.Pad(contribution, pads)
    # [.., count * size, ..] as [.., count, size, ..]; a zero keeps the size of an axis.
    shape = [0] * axis + [count, size] + [-1] * (axis < x.rank - 1)
    if axis < x.rank - 2:
        rest = (x.shape or ())[axis + 1 :]
        if not all(isinstance(d, int) for d in rest):
            raise NoGradientRule("by the scales of blocks of unknown shape")
        shape = [0] * axis + [count, size, *(int(d) for d in rest if isinstance(d, int))]
    return op.ReduceSum(op.Reshape(contribution, shape), axes=[axis + 1], keepdims=0)


@RULES.rule("QuantizeLinear", attributes=("axis", "output_dtype", "precision", "saturate"))
def _quantize(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, scale, zero = node.inputs[0], node.inputs[1], node.input(2)
    y = node.outputs[0]
    g = op.Cast(full(op, g, y), to=x.dtype)
    spread = op.Cast(_spread(op, node, scale), to=x.dtype)
    steps = x / spread
    bounds = _RANGES.get(y.dtype)
    if bounds is not None:
        place = op.Round(steps)
        if zero is not None and (zero.constant is None or zero.constant.any()):
            place = place + _spread(op, node, op.Cast(zero, to=x.dtype))
        low, high = bounds
        inside = op.And(place >= low, place <= high)
        g = op.Where(inside, g, 0.0)
    elif y.dtype in _ENDS and node.saturate:
        g = op.Where(op.Abs(steps) < _ENDS[y.dtype], g, 0.0)
    slope = g / spread

    def to_scale() -> Tensor:
        return op.Cast(_to_scale(op, node, -slope * steps), to=scale.dtype)

    return [slope, to_scale, None]


@RULES.rule("DequantizeLinear", attributes=("axis", "output_dtype"))
def _dequantize(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    (q, scale), zero, y = node.inputs[:2], node.input(2), node.outputs[0]
    spread = op.Cast(_spread(op, node, scale), to=y.dtype)
    whole = full(op, g, y)

    def to_scale() -> Tensor:
        # Not y / scale: onnxruntime 1.16 duplicates a node whose output is read twice, and the copy
        # loses its axis.
        steps = op.Cast(q, to=y.dtype)
        if zero is not None:
            steps = steps - _spread(op, node, op.Cast(zero, to=y.dtype))
        return op.Cast(_to_scale(op, node, whole * steps), to=scale.dtype)

    return [lambda: whole * spread, to_scale, None]


@RULES.rule("DynamicQuantizeLinear")
def _dynamic(op: Ops, node: NodeView, g: Tensor | None, *_: Tensor | None) -> Sequence[Gradient]:
    """The integers cover the range of x, so nothing saturates. The scale is treated as a constant."""
    return [None if g is None else full(op, g, node.outputs[0]) / node.outputs[1]]


def _centered(op: Ops, whole: Tensor, zero: Tensor | None, axes: Sequence[int]) -> Tensor:
    """Integers minus their zero point, in float32; ``axes`` are added to a vector of zero points."""
    x = op.Cast(whole, to=TensorProto.FLOAT)
    if zero is None:
        return x
    place = op.Cast(zero, to=TensorProto.FLOAT)
    return x - (op.Unsqueeze(place, axes=list(axes)) if zero.rank and axes else place)


@RULES.rule("MatMulInteger")
def _matmul_integer(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The integers are treated as real numbers, as in MatMul."""
    a = _centered(op, node.inputs[0], node.input(2), [-1])
    b = _centered(op, node.inputs[1], node.input(3), [])
    return node.through([op.MatMul(a, b)], op.Cast(g, to=TensorProto.FLOAT))


@RULES.rule("ConvInteger")
def _conv_integer(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The integers are treated as real numbers, as in Conv."""
    rank = node.inputs[0].rank
    if rank is None:
        raise NoGradientRule("with an input of unknown rank")
    x = _centered(op, node.inputs[0], node.input(2), [])
    w = _centered(op, node.inputs[1], node.input(3), range(1, rank))
    settings = node.settings("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    y = op.Conv(x, w, **settings)
    return node.through([y], op.Cast(g, to=TensorProto.FLOAT))
