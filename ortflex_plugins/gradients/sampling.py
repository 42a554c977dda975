"""Gradient rules of the operators that read images between their points.

A point is read as a weighted sum over its neighbours, the taps; what was read with a weight gets
its share of the cotangent with the same weight, added up by ScatterElements.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import product

import attrs
import numpy as np
import onnx

from ortflex_core.autodiff import Gradient, NodeView, Rules
from ortflex_core.cotangents import full, reshape_like, zeros_like
from ortflex_core.errors import NoGradientRule
from ortflex_core.ops import Ops, Tensor

RULES = Rules()

_INT64 = onnx.TensorProto.INT64


@attrs.frozen
class Tap:
    """One neighbour along one axis: its place, its weight, and the weight's slope (None: 0)."""

    place: Tensor
    weight: Tensor | float
    slope: Tensor | float | None


def _size(op: Ops, x: Tensor, axis: int) -> Tensor:
    """The size of an axis as a rank-0 int64, constant where it is known."""
    size = None if x.shape is None else x.shape[axis]
    return op.constant(size) if isinstance(size, int) else op.Gather(op.Shape(x), op.constant(axis))


@RULES.rule("GridSample")
def _grid_sample(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, grid = node.inputs
    if x.rank is None:
        raise NoGradientRule("on a tensor of unknown rank")
    n = x.rank - 2
    whole = full(op, g, node.outputs[0])
    sizes = [_size(op, x, 2 + axis) for axis in range(n)]
    # The last column of the grid is the first spatial axis.
    columns = [op.Gather(grid, op.constant(n - 1 - axis), axis=-1) for axis in range(n)]
    points = [
        _denormalized(op, op.Reshape(c, op.constant([0, -1])), s, node.align_corners)
        for c, s in zip(columns, sizes, strict=True)
    ]
    taps = [_taps(op, node, p, s) for (p, _), s in zip(points, sizes, strict=True)]
    read = list(product(*taps))
    places = _joined(op, [_flat_place(op, combination, sizes) for combination in read])
    flat_x = op.Reshape(x, op.constant([0, 0, -1]))
    flat_g = op.Reshape(whole, op.constant([0, 0, -1]))

    def to_x() -> Tensor:
        weights = [_times(t.weight for t in combination) for combination in read]
        parts = [flat_g if w == 1 else flat_g * _over_channels(op, w) for w in weights]
        return reshape_like(op, _added(op, flat_x, places, _joined(op, parts)), x)

    def to_grid() -> Tensor:
        every = op.Concat(*[flat_g] * len(read), axis=2)
        index = op.Expand(op.Unsqueeze(places, axes=[1]), op.Shape(every))
        pull = op.ReduceSum(op.GatherElements(flat_x, index, axis=2) * every, axes=[1], keepdims=0)
        sides = []
        for axis, (_, scale) in enumerate(points):
            slopes = [
                _times(t.slope if k == axis else t.weight for k, t in enumerate(combination))
                for combination in read
            ]
            weighted = pull * _joined(op, slopes)
            apart = op.Reshape(weighted, op.constant([0, len(read), -1]))
            sides.append(op.Unsqueeze(op.ReduceSum(apart, axes=[1], keepdims=0) * scale, axes=[2]))
        return reshape_like(op, op.Concat(*reversed(sides), axis=2), grid)

    return [to_x, None if node.mode == "nearest" else to_grid]


def _denormalized(op: Ops, value: Tensor, size: Tensor, corners: int) -> tuple[Tensor, Tensor]:
    """Where −1 … 1 lies on an axis, and the scale."""
    number = op.Cast(size, to=value.dtype)
    if corners:
        scale = (number - 1) * 0.5
        return (value + 1) * scale, scale
    scale = number * 0.5
    return (value + 1) * scale - 0.5, scale


def _taps(op: Ops, node: NodeView, point: Tensor, size: Tensor) -> list[Tap]:
    if node.mode == "nearest":
        return [_placed(op, node, op.Cast(op.Round(point), to=_INT64), size, 1.0, None)]
    below = op.Floor(point)
    rest, first = point - below, op.Cast(below, to=_INT64)
    if node.mode in ("bilinear", "linear"):
        rows: list[tuple[int, Tensor | float, Tensor | float]] = [
            (0, 1 - rest, -1.0),
            (1, rest, 1.0),
        ]
    else:
        rows = [(k, *_cubic(op, rest, k)) for k in (-1, 0, 1, 2)]
    one = op.constant(np.ones((1, 1), np.float32), point.dtype)
    return [
        _placed(
            op, node, first + k, size, weight, one * slope if isinstance(slope, float) else slope
        )
        for k, weight, slope in rows
    ]


def _cubic(op: Ops, rest: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Keys' cubic convolution with a = −3/4 at the distance |rest − k|, and its slope."""
    a, away = -0.75, 1.0 if k <= 0 else -1.0
    s = rest - k if k <= 0 else k - rest
    if k in (0, 1):
        weight = ((a + 2) * s - (a + 3)) * (s * s) + 1
        slope = (3 * (a + 2) * s - 2 * (a + 3)) * s
    else:
        weight = ((a * s - 5 * a) * s + 8 * a) * s - 4 * a
        slope = (3 * a * s - 10 * a) * s + 8 * a
    return weight, away * slope


def _placed(
    op: Ops,
    node: NodeView,
    place: Tensor,
    size: Tensor,
    weight: Tensor | float,
    slope: Tensor | float | None,
) -> Tap:
    """A tap whose place lies inside, as the padding mode has it."""
    if node.padding_mode == "border":
        return Tap(op.Max(op.Min(place, size - 1), 0), weight, slope)
    if node.padding_mode == "reflection":
        last = 2 * size - (2 if node.align_corners else 1)
        period = op.Max(last, 1) if node.align_corners else 2 * size
        turned = op.Mod(place, period)
        return Tap(op.Min(turned, last - turned), weight, slope)
    inside = op.Max(op.Min(place, size - 1), 0)
    mask = op.Equal(place, inside)
    dtype = weight.dtype if isinstance(weight, Tensor) else node.inputs[0].dtype
    kept = op.Cast(mask, to=dtype)
    return Tap(inside, kept * weight, None if slope is None else kept * slope)


def _times(factors: object) -> Tensor | float:
    return functools.reduce(operator.mul, factors)  # type: ignore[no-any-return, call-overload]


def _joined(op: Ops, parts: Sequence[Tensor | float]) -> Tensor:
    """Side by side along the last axis; only a lone tap has a number for its weight."""
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=-1)  # type: ignore[return-value]


def _flat_place(op: Ops, taps: Sequence[Tap], sizes: Sequence[Tensor]) -> Tensor:
    place = taps[0].place
    for tap, size in zip(taps[1:], sizes[1:], strict=True):
        place = place * size + tap.place
    return place


def _over_channels(op: Ops, weight: Tensor | float) -> Tensor | float:
    return op.Unsqueeze(weight, axes=[1]) if isinstance(weight, Tensor) else weight


def _added(op: Ops, like: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """``values`` [N, C, K] added at ``places`` [N, K] of zeros like [N, C, P]."""
    index = op.Expand(op.Unsqueeze(places, axes=[1]), op.Shape(values))
    return op.ScatterElements(zeros_like(op, like), index, values, axis=2, reduction="add")  # type: ignore[no-any-return]


@RULES.rule("AffineGrid")
def _affine_grid(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Grid = base · θᵀ, and the identity's grid is the base without its column of ones."""
    theta, size = node.inputs
    y = node.outputs[0]
    length = y.rank if size.shape is None else size.shape[0]
    if not isinstance(length, int):
        raise NoGradientRule("with a size of unknown length")
    n = length - 2
    one = op.Concat(op.constant([1]), op.Slice(size, [1], [n + 2]), axis=0)
    unit = op.constant(np.eye(n, n + 1, dtype=np.float32)[None], theta.dtype)
    base = op.Reshape(
        op.AffineGrid(unit, one, align_corners=node.align_corners), op.constant([-1, n])
    )
    whole = op.Reshape(full(op, g, y), op.constant([0, -1, n]))
    with_ones = op.Pad(base, op.constant([0, 0, 0, 1]), op.constant(1.0, theta.dtype))
    return [op.MatMul(op.Transpose(whole, perm=[0, 2, 1]), with_ones), None]


@RULES.rule("RoiAlign", since=10)
def _roi_align(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The mean of samples on a grid over each region; regions themselves get no gradient."""
    x, regions, batch = node.inputs
    if node.mode != "avg" or node.sampling_ratio <= 0:
        raise NoGradientRule(f"with mode={node.mode!r} and sampling_ratio={node.sampling_ratio}")
    if op.opset < 16:
        raise NoGradientRule("before opset 16")
    counts = (node.output_height, node.output_width)
    per = node.sampling_ratio
    sizes = [_size(op, x, axis) for axis in (2, 3)]
    taps = [_region_taps(op, node, regions, k, counts[k], sizes[k]) for k in (0, 1)]
    # [C, R, h, s, w, s]: every sample of a bin gets the same share.
    share = op.Transpose(full(op, g, node.outputs[0]), perm=[1, 0, 2, 3]) * (1 / per**2)
    share = op.Unsqueeze(share, axes=[3, 5])
    channels = op.Reshape(op.Transpose(x, perm=[1, 0, 2, 3]), op.constant([0, -1]))
    start = op.Unsqueeze(batch * (sizes[0] * sizes[1]), axes=[1, 2, 3, 4])
    places, values = [], []
    for row, column in product(*taps):
        down = op.Unsqueeze(row.place * sizes[1], axes=[3, 4])
        places.append(op.Reshape(start + down + op.Unsqueeze(column.place, axes=[1, 2]), [-1]))
        weight = op.Unsqueeze(row.weight, axes=[3, 4]) * op.Unsqueeze(column.weight, axes=[1, 2])
        shared = share * op.Unsqueeze(weight, axes=[0])
        values.append(op.Reshape(shared, op.Concat(_rows(op, x), op.constant([-1]), axis=0)))
    together, index = _joined(op, values), _joined(op, places)
    zeros = zeros_like(op, channels)
    every = op.Expand(op.Unsqueeze(index, axes=[0]), op.Shape(together))
    added = op.ScatterElements(zeros, every, together, axis=1, reduction="add")
    apart = op.Reshape(
        added,
        op.Concat(
            _rows(op, x), op.constant([-1]), *(op.Unsqueeze(s, axes=[0]) for s in sizes), axis=0
        ),
    )
    return [op.Transpose(apart, perm=[1, 0, 2, 3]), None, None]


def _rows(op: Ops, x: Tensor) -> Tensor:
    return op.Unsqueeze(_size(op, x, 1), axes=[0])  # type: ignore[no-any-return]


def _region_taps(
    op: Ops, node: NodeView, regions: Tensor, axis: int, count: int, size: Tensor
) -> list[Tap]:
    """The two neighbours of every sample along one axis: [R, bins, samples]."""
    # A region is (x1, y1, x2, y2); the first axis of an image is y.
    half = node.coordinate_transformation_mode == "half_pixel"
    first, last = (
        op.Gather(regions, op.constant(k), axis=1) * node.spatial_scale - (0.5 if half else 0.0)
        for k in (1 - axis, 3 - axis)
    )
    length = last - first if half else op.Max(last - first, 1.0)
    per = node.sampling_ratio
    parts = (np.arange(count)[:, None] + (np.arange(per) + 0.5) / per) / count
    steps = op.constant(parts[None].astype(np.float32), regions.dtype)
    point = op.Unsqueeze(first, axes=[1, 2]) + op.Unsqueeze(length, axes=[1, 2]) * steps
    number = op.Cast(size, to=regions.dtype)
    inside = op.And(point >= -1.0, point <= number)
    held = op.Min(op.Max(point, 0.0), number - 1)
    below = op.Floor(held)
    rest, kept = held - below, op.Cast(inside, to=regions.dtype)
    place = op.Cast(below, to=_INT64)
    above = op.Min(place + 1, size - 1)
    return [Tap(place, kept * (1 - rest), None), Tap(above, kept * rest, None)]
