"""Gradient rules of RoiAlign and MaxRoiPool, which read regions of images into grids of bins.

All images side by side are [C, N · H · W], and the places of the regions are indices of the second
axis. The regions have no gradient: MaxRoiPool rounds them, and RoiAlign with a gradient of its regions
is refused.

Source: Girshick, "Fast R-CNN" (2015); He et al., "Mask R-CNN" (2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Tensor,
    add_at,
    count_to,
    dims,
    full,
    size_of,
    size_vector,
    zeros_like,
)
from ortflex_plugins.gradients._interpolation import INT64, Tap, below, clamped


def roi_align(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
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


def max_roi_pool(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
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
