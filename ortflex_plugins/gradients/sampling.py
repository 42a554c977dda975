"""Gradient rules of the operators that read images between their points, or regions of them.

Source: Girshick, "Fast R-CNN" (2015); He et al., "Mask R-CNN" (2017), for regions; Dai et al., "Deformable
convolutional networks" (2017); Zhu et al., "Deformable ConvNets v2" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    add_at,
    count_to,
    dims,
    full,
    known_size,
    known_sizes,
    reshape_like,
    size_of,
    size_vector,
    zeros_like,
)
from ortflex_plugins.gradients._interpolation import (
    INT64,
    Samples,
    Tap,
    below,
    clamped,
    linear_taps,
    zeros_outside,
)
from ortflex_plugins.gradients._windows import Sizes

RULES = Rules()


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


# DeformConv --------------------------------------------------------------------------------------
#
# The kernel reads columns [N, C · taps, windows], as in any convolution; each element is an interpolated
# value of the image, times the mask. The gradient of the weights is the product of the cotangent with the
# columns; the gradients of image, offsets and mask share its product with the weights.


@RULES.rule("DeformConv", attributes=("kernel_shape",))
def _deform_conv(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The output is W · (mask ∘ x at the shifted window positions). The shape of W must be known."""
    x, weight, offset, _, mask = (*node.inputs, None, None)[:5]
    sizes = known_sizes(weight)
    if sizes is None:
        raise NoGradientRule("with weights of unknown shape")
    groups, taps = node.offset_group, math.prod(sizes[2:])
    channels, rows = sizes[1] * node.group // groups, sizes[0] // node.group
    batch = known_size(x, 0)

    def shaped(value: Tensor, times: int, *other_sizes: int) -> Tensor:
        """``value`` as [N · times, *other_sizes]."""
        if batch is not None or groups == 1:
            return op.Reshape(value, [(batch or 0) * times, *other_sizes])
        first = op.Slice(op.Shape(x), [0], [1]) * times
        return op.Reshape(value, op.Concat(first, op.constant(other_sizes), axis=0))

    # Each group of offsets is a separate image: [N · groups, channels, places].
    places = [size_of(op, x, 2 + axis) for axis in range(len(sizes) - 2)]
    image = shaped(x, groups, channels, -1)
    samples = Samples(image, _deformed_taps(op, node, offset, sizes[2:], shaped, places), places)
    weights = None if mask is None else shaped(mask, groups, 1, -1)
    whole = shaped(full(op, g, node.outputs[0]), 1, node.group, rows, -1)
    kernel = op.Reshape(weight, [node.group, rows, sizes[1] * taps])

    def to_columns() -> Tensor:
        """The cotangent of the columns, [N · groups, channels, taps · windows]."""
        columns = op.MatMul(op.Transpose(kernel, perm=[0, 2, 1]), whole)
        return shaped(columns, groups, channels, -1)

    def to_samples() -> Tensor:
        return to_columns() if weights is None else to_columns() * weights

    def to_weight() -> Tensor:
        columns = samples.values(op) if weights is None else samples.values(op) * weights
        windows = shaped(columns, 1, node.group, sizes[1] * taps, -1)
        product = op.MatMul(whole, op.Transpose(windows, perm=[0, 1, 3, 2]))
        return reshape_like(op, op.ReduceSum(product, axes=[0], keepdims=0), weight)

    def to_offset() -> Tensor:
        sides = [shaped(s, groups, taps, 1, -1) for s in samples.to_points(op, to_samples())]
        return reshape_like(op, op.Concat(*sides, axis=2), offset)

    def to_mask() -> Tensor:
        total = op.ReduceSum(to_columns() * samples.values(op), axes=[1], keepdims=0)
        return reshape_like(op, total, mask)

    return [
        lambda: reshape_like(op, samples.to_image(op, to_samples()), x),
        to_weight,
        to_offset,
        lambda: op.Reshape(op.ReduceSum(whole, axes=[0, 3], keepdims=0), [-1]),
        to_mask,
    ][: len(node.inputs)]


def _deformed_taps(
    op: Ops,
    node: NodeView,
    offset: Tensor,
    kernel: Sizes,
    shaped: Callable[..., Tensor],
    places: Sequence[Tensor],
) -> list[list[Tap]]:
    """The neighbors, along each axis, of every place that the kernel reads."""
    n = len(kernel)
    strides, dilations = node.strides or [1] * n, node.dilations or [1] * n
    pads = node.pads or [0] * (2 * n)
    offsets = shaped(offset, node.offset_group, math.prod(kernel), n, -1)
    out = []
    for axis, size in enumerate(places):
        count = count_to(op, size_of(op, offset, 2 + axis))
        starts = op.Cast(count * strides[axis] - pads[axis], to=offset.dtype)
        # [taps, 1] and [windows], over all axes.
        steps = np.indices(kernel)[axis].reshape(-1, 1) * dilations[axis]
        others = [k for k in range(n) if k != axis]
        grid = op.Unsqueeze(starts, axes=others) if others else starts
        windows = op.Reshape(op.Expand(grid, op.Slice(op.Shape(offset), [2], [2 + n])), [-1])
        regular = windows + op.constant(steps.astype(np.float32), offset.dtype)
        # [N · groups, taps, windows], with the column of the offsets for this axis.
        moved = regular + op.Gather(offsets, axis, axis=2)
        point = op.Reshape(moved, [0, -1])
        out.append([zeros_outside(op, t, size, offset.dtype) for t in linear_taps(op, point)])
    return out


# Regions -----------------------------------------------------------------------------------------
#
# RoiAlign and MaxRoiPool read regions of images into grids of bins. All images side by side are
# [C, N · H · W], and the places of the regions are indices of the second axis. The regions have no
# gradient: MaxRoiPool rounds them, and RoiAlign with a gradient of its regions is refused.


@RULES.rule("RoiAlign", since=10)
def _roi_align(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Each bin is the mean or maximum of samples on a grid. The regions have no gradient."""
    if node.needs(1):
        raise NoGradientRule("by its regions (input rois)")
    x, regions, batch = node.inputs
    sizes = [size_of(op, x, axis) for axis in (2, 3)]
    rows, columns = (_samples(op, node, regions, axis, sizes[axis]) for axis in (0, 1))
    start = op.Unsqueeze(batch * (sizes[0] * sizes[1]), axes=[1, 2, 3, 4])
    places, weights = [], []
    for row, column in product(rows, columns):
        # [R, h, s, w, s]: rows and their samples, columns and their samples.
        down = op.Unsqueeze(row.place * sizes[1], axes=[3, 4])
        places.append(start + down + op.Unsqueeze(column.place, axes=[1, 2]))
        weights.append(
            op.Unsqueeze(row.weight, axes=[3, 4]) * op.Unsqueeze(column.weight, axes=[1, 2])
        )
    # [C, R, h, w]
    cotangent = op.Transpose(full(op, g, node.outputs[0]), perm=[1, 0, 2, 3])
    if node.mode == "max":
        return [_largest(op, x, places, weights, cotangent), None, None]
    share = op.Unsqueeze(cotangent, axes=[3, 5])
    values = [_flat(op, x, share * op.Unsqueeze(w, axes=[0])) for w in weights]
    index = op.Concat(*(op.Reshape(p, [-1]) for p in places), axis=0)
    return [_added(op, x, index, op.Concat(*values, axis=1)), None, None]


def _samples(op: Ops, node: NodeView, regions: Tensor, axis: int, size: Tensor) -> list[Tap]:
    """The two neighbors of every sample along one axis: [R, bins, samples]."""
    count = (node.output_height, node.output_width)[axis]
    # A region is (x1, y1, x2, y2); the first axis of an image is y. Before opset 16 there is one mode.
    half = node.coordinate_transformation_mode == "half_pixel"
    first, last = (
        op.Gather(regions, k, axis=1) * node.spatial_scale - (0.5 if half else 0.0)
        for k in (1 - axis, 3 - axis)
    )
    length = last - first if half else op.Max(last - first, 1.0)
    first, length = (op.Unsqueeze(t, axes=[1, 2]) for t in (first, length))
    bins = op.constant(np.arange(count, dtype=np.float32)[:, None], regions.dtype)
    largest = node.mode == "max"
    if node.sampling_ratio > 0:
        number = node.sampling_ratio
        steps = op.constant(((np.arange(number) + 0.5) / number).astype(np.float32), regions.dtype)
        share: Tensor | float = 1.0 if largest else 1.0 / number
    else:
        # The number of samples is the width of a bin, which differs between regions; the largest number
        # decides the shape.
        wanted = op.Ceil(length / float(count))
        numbers = op.Max(wanted, 1.0)
        largest_number = op.Cast(op.ReduceMax(numbers, keepdims=0), to=INT64)
        index = op.Cast(count_to(op, largest_number), to=regions.dtype)
        # A repeated sample does not change a maximum; in a mean its weight is 0.
        steps = ((op.Min(index, numbers - 1) if largest else index) + 0.5) / numbers
        share = op.Cast(wanted > 0 if largest else index < wanted, to=regions.dtype)
        share = share if largest else share / numbers
    point = first + length * ((bins + steps) * (1.0 / count))
    end = op.Cast(size, to=regions.dtype)
    inside = op.Cast(op.And(point >= -1.0, point <= end), to=regions.dtype)
    place, distance = below(op, op.Min(op.Max(point, 0.0), end - 1))
    weight = inside * share
    above = op.Min(place + 1, size - 1)
    return [Tap(place, weight * (1 - distance), None), Tap(above, weight * distance, None)]


def _largest(
    op: Ops, x: Tensor, places: Sequence[Tensor], weights: Sequence[Tensor], g: Tensor
) -> Tensor:
    """The first of the largest products weight · value of each bin gets the whole gradient."""

    def by_bin(samples: Sequence[Tensor]) -> Tensor:
        """[R, h, w, samples of the bin]."""
        turned = [op.Transpose(t, perm=[0, 1, 3, 2, 4]) for t in samples]
        return op.Concat(*(op.Reshape(t, [0, 0, 0, -1]) for t in turned), axis=3)

    return _to_first(op, x, by_bin(places), by_bin(weights), g)


@RULES.rule("MaxRoiPool")
def _max_roi_pool(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The first maximum of each bin gets the gradient. The regions are rounded and have no gradient."""
    x, regions = node.inputs
    sizes = [size_of(op, x, axis) for axis in (2, 3)]
    batch = op.Cast(op.Gather(regions, 0, axis=1), to=INT64)
    (rows, no_rows), (columns, no_columns) = (
        _bins(op, node, regions, axis, sizes[axis]) for axis in (0, 1)
    )
    start = op.Unsqueeze(batch * (sizes[0] * sizes[1]), axes=[1, 2, 3, 4])
    down = op.Unsqueeze(rows * sizes[1], axes=[2, 4])
    places = start + down + op.Unsqueeze(columns, axes=[1, 3])
    places = op.Reshape(places, [0, 0, 0, -1])
    empty = op.Or(op.Unsqueeze(no_rows, axes=[2]), op.Unsqueeze(no_columns, axes=[1]))
    cotangent = op.Transpose(full(op, g, node.outputs[0]), perm=[1, 0, 2, 3])
    cotangent = op.Where(op.Unsqueeze(empty, axes=[0]), 0.0, cotangent)
    return [_to_first(op, x, places, None, cotangent), None]


def _bins(
    op: Ops, node: NodeView, regions: Tensor, axis: int, size: Tensor
) -> tuple[Tensor, Tensor]:
    """The places of each bin along one axis, [R, bins, longest], and which bins are empty.

    A bin shorter than the longest repeats its last place.
    """
    count = node.pooled_shape[axis]
    scaled = [op.Gather(regions, k, axis=1) * node.spatial_scale for k in (2 - axis, 4 - axis)]
    # Halves are rounded away from zero.
    first, last = (op.Sign(v) * op.Floor(op.Abs(v) + 0.5) for v in scaled)
    each = op.Unsqueeze(op.Max(last - first + 1.0, 1.0) / float(count), axes=[1])
    first = op.Unsqueeze(first, axes=[1])
    index = op.constant(np.arange(count, dtype=np.float32), regions.dtype)
    ends = (op.Floor(index * each) + first, op.Ceil((index + 1.0) * each) + first)
    begin, end = (op.Max(op.Min(op.Cast(e, to=INT64), size), 0) for e in ends)
    longest = op.Max(op.ReduceMax(end - begin, keepdims=0), 1)
    places = op.Unsqueeze(begin, axes=[2]) + count_to(op, longest)
    inside = clamped(op, places, op.Unsqueeze(end, axes=[2]))
    return op.Min(inside, size - 1), op.LessOrEqual(end, begin)


def _to_first(op: Ops, x: Tensor, places: Tensor, weights: Tensor | None, g: Tensor) -> Tensor:
    """Cotangents ``g`` [C, R, h, w], added at the first maximum of [R, h, w, samples]."""
    side_by_side = op.Reshape(op.Transpose(x, perm=[1, 0, 2, 3]), [0, -1])
    values = op.Gather(side_by_side, places, axis=1)
    if weights is not None:
        values = values * op.Unsqueeze(weights, axes=[0])
    chosen = op.ArgMax(values, axis=4, keepdims=1)
    shape = op.Shape(values)

    def of(t: Tensor) -> Tensor:
        whole = op.Expand(op.Unsqueeze(t, axes=[0]), shape)
        return _flat(op, x, op.GatherElements(whole, chosen, axis=4))

    share = _flat(op, x, g)
    return _added(op, x, of(places), share if weights is None else share * of(weights))


def _flat(op: Ops, x: Tensor, values: Tensor) -> Tensor:
    """[C, …] as [C, elements], with the C of ``x``."""
    return op.Reshape(values, op.Concat(size_vector(op, x, 1), op.constant([-1]), axis=0))


def _added(op: Ops, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """``values`` [C, K] summed at ``index``, [K] or [C, K], in the shape of ``x``."""
    turned = op.Transpose(x, perm=[1, 0, 2, 3])
    zeros = zeros_like(op, op.Reshape(turned, [0, -1]))
    added = add_at(op, zeros, op.Expand(index, op.Shape(values)), values)
    return op.Transpose(op.Reshape(added, dims(op, turned)), perm=[1, 0, 2, 3])
