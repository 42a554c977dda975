"""Gradient rules of the operators that read images between their points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    full,
    reshape_like,
    size_of,
)
from ortflex_plugins.gradients._deformed import deform_conv
from ortflex_plugins.gradients._interpolation import (
    INT64,
    Samples,
    Tap,
    below,
    clamped,
    linear_taps,
    zeros_outside,
)
from ortflex_plugins.gradients._regions import max_roi_pool, roi_align

RULES = Rules()

RULES.rule("DeformConv", attributes=("kernel_shape",))(deform_conv)
RULES.rule("MaxRoiPool")(max_roi_pool)
RULES.rule("RoiAlign", since=10)(roi_align)


@RULES.rule("GridSample")
def _grid_sample(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, grid = node.inputs
    if x.rank is None:
        raise NoGradientRule("on a tensor of unknown rank")
    n = x.rank - 2
    whole = full(op, g, node.outputs[0])
    sizes = [size_of(op, x, 2 + axis) for axis in range(n)]
    # The last column of the grid is the first spatial axis.
    columns = [op.Reshape(op.Gather(grid, n - 1 - axis, axis=-1), [0, -1]) for axis in range(n)]
    points = [
        _denormalized(op, c, s, node.align_corners) for c, s in zip(columns, sizes, strict=True)
    ]
    taps = [_taps(op, node, p, s) for (p, _), s in zip(points, sizes, strict=True)]
    samples = Samples(op.Reshape(x, [0, 0, -1]), taps, sizes)
    flat_g = op.Reshape(whole, [0, 0, -1])

    def to_grid() -> Tensor:
        pairs = zip(samples.to_points(op, flat_g), points, strict=True)
        sides = [op.Unsqueeze(pull * scale, axes=[2]) for pull, (_, scale) in pairs]
        return reshape_like(op, op.Concat(*reversed(sides), axis=2), grid)

    return [
        lambda: reshape_like(op, samples.to_image(op, flat_g), x),
        None if node.mode == "nearest" else to_grid,
    ]


def _denormalized(op: Ops, value: Tensor, size: Tensor, corners: int) -> tuple[Tensor, Tensor]:
    """The position on an axis for a value from −1 to 1, and the scale."""
    count = op.Cast(size, to=value.dtype)
    scale = (count - 1 if corners else count) * 0.5
    position = (value + 1) * scale
    return position if corners else position - 0.5, scale


def _taps(op: Ops, node: NodeView, point: Tensor, size: Tensor) -> list[Tap]:
    if node.mode == "nearest":
        taps = [Tap(op.Cast(op.Round(point), to=INT64), 1.0, None)]
    elif node.mode in ("bilinear", "linear"):
        taps = linear_taps(op, point)
    else:
        first, distance = below(op, point)
        taps = [Tap(first + k, *_cubic(distance, k)) for k in (-1, 0, 1, 2)]
    return [_placed(op, node, tap, size) for tap in taps]


def _cubic(distance: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Keys' cubic convolution with a = −3/4 at abs(distance − k), and its slope."""
    a, sign = -0.75, 1.0 if k <= 0 else -1.0
    s = distance - k if k <= 0 else k - distance
    if k in (0, 1):
        weight = ((a + 2) * s - (a + 3)) * (s * s) + 1
        slope = (3 * (a + 2) * s - 2 * (a + 3)) * s
    else:
        weight = ((a * s - 5 * a) * s + 8 * a) * s - 4 * a
        slope = (3 * a * s - 10 * a) * s + 8 * a
    return weight, sign * slope


def _placed(op: Ops, node: NodeView, tap: Tap, size: Tensor) -> Tap:
    """The tap with its place moved into the image by the padding mode."""
    if node.padding_mode == "border":
        return Tap(clamped(op, tap.place, size), tap.weight, tap.slope)
    if node.padding_mode == "reflection":
        last = 2 * size - (2 if node.align_corners else 1)
        period = op.Max(last, 1) if node.align_corners else 2 * size
        place = op.Mod(tap.place, period)
        return Tap(op.Min(place, last - place), tap.weight, tap.slope)
    dtype = tap.weight.dtype if isinstance(tap.weight, Tensor) else node.inputs[0].dtype
    return zeros_outside(op, tap, size, dtype)


@RULES.rule("AffineGrid")
def _affine_grid(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The grid is base · θᵀ, where each row of base contains the coordinates of a point and a 1."""
    theta, size = node.inputs
    y = node.outputs[0]
    length = y.rank if size.shape is None else size.shape[0]
    if not isinstance(length, int):
        raise NoGradientRule("with a size of unknown length")
    n = length - 2
    one = op.Concat(op.constant([1]), op.Slice(size, [1], [n + 2]), axis=0)
    unit = op.constant(np.eye(n, n + 1, dtype=np.float32)[None], theta.dtype)
    base = op.Reshape(op.AffineGrid(unit, one, align_corners=node.align_corners), [-1, n])
    whole = op.Reshape(full(op, g, y), [0, -1, n])
    with_ones = op.Pad(base, [0, 0, 0, 1], op.constant(1.0, theta.dtype))
    return [op.MatMul(op.Transpose(whole, perm=[0, 2, 1]), with_ones), None]
