"""Regions of images, images read between their points, convolutions with places of their own; numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ortflex_core import Array


def neighbors(place: float, size: int) -> list[tuple[int, float]]:
    """(place, weight) of the two points around one that is held inside of the image."""
    held = min(max(place, 0), size - 1)
    low = int(held)
    return [(low, 1 - (held - low)), (min(low + 1, size - 1), held - low)]


def roi_aligned(x: Array, regions: Array, batch: Array, **options: Any) -> Array:
    """Bilinear samples of regions as Mask R-CNN defines them, their mean or the largest product."""
    height, width = counts = options["output_height"], options["output_width"]
    scale, ratio = options.get("spatial_scale", 1.0), options.get("sampling_ratio", 0)
    half = options.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    largest = options.get("mode") == "max"
    out = np.zeros((len(batch), x.shape[1], *counts))
    for r, (b, (x1, y1, x2, y2)) in enumerate(zip(batch, regions, strict=True)):
        first = np.array([y1, x1]) * scale - (0.5 if half else 0.0)
        length = np.array([y2 - y1, x2 - x1]) * scale
        length = length if half else np.maximum(length, 1.0)
        per = [ratio or max(0, math.ceil(n / c)) for n, c in zip(length, counts, strict=True)]
        for i, j in np.ndindex(height, width):
            found = []
            for sample in np.ndindex(*per):
                rows = zip(first, length, (i, j), sample, per, counts, strict=True)
                v, u = (a + n * (k + (s + 0.5) / p) / c for a, n, k, s, p, c in rows)
                outside = not (-1 <= v <= x.shape[2] and -1 <= u <= x.shape[3])
                pairs = itertools.product(neighbors(v, x.shape[2]), neighbors(u, x.shape[3]))
                found += [x[b, :, e, f] * (0 if outside else p * q) for (e, p), (f, q) in pairs]
            if found:
                out[r, :, i, j] = np.max(found, axis=0) if largest else np.sum(found, axis=0)
                out[r, :, i, j] /= 1 if largest else math.prod(per)
    return out


def max_roi_pooled(x: Array, regions: Array, pooled_shape: list[int], scale: float = 1.0) -> Array:
    """The largest of each bin of regions that are rounded to whole places; 0 of an empty bin."""
    out = np.zeros((len(regions), x.shape[1], *pooled_shape))
    sides = [(2, 4), (1, 3)]
    for r, region in enumerate(np.asarray(regions, np.float32)):
        ranges = []
        for count, (a, b), size in zip(pooled_shape, sides, x.shape[2:], strict=True):
            ends = region[[a, b]] * scale
            first, last = (int(np.copysign(np.floor(abs(v) + 0.5), v)) for v in ends)
            each = np.float32(max(last - first + 1, 1)) / np.float32(count)
            low = [math.floor(np.float32(k) * each) + first for k in range(count)]
            high = [math.ceil(np.float32(k + 1) * each) + first for k in range(count)]
            held = [np.clip(pair, 0, size) for pair in zip(low, high, strict=True)]
            ranges.append([range(*pair) for pair in held])
        for (i, rows), (j, columns) in itertools.product(*map(enumerate, ranges)):
            if len(rows) and len(columns):
                seen = x[int(region[0])][:, rows.start : rows.stop, columns.start : columns.stop]
                out[r, :, i, j] = seen.max(axis=(1, 2))
    return out


def deform_convolved(
    x: Array, w: Array, offset: Array, b: Any = None, mask: Any = None, **options: Any
) -> Array:
    """Σ_κ w_κ · mask_κ · x at the window's place + κ + offset_κ, 0 outside of the image."""
    n, channels, *image = x.shape
    group, own = options.get("group", 1), options.get("offset_group", 1)
    kernel, out = w.shape[2:], offset.shape[2:]
    strides, dilations, pads = (
        options.get(k, d)
        for k, d in (("strides", [1, 1]), ("dilations", [1, 1]), ("pads", [0] * 4))
    )
    taps = math.prod(kernel)
    offset = offset.reshape(n, own, taps, 2, *out)
    held = np.ones((n, own, taps, *out)) if mask is None else mask.reshape(n, own, taps, *out)
    points = []
    for axis in (0, 1):
        window = np.indices(out)[axis] * strides[axis] - pads[axis]
        tap = np.indices(kernel)[axis].reshape(-1, 1, 1) * dilations[axis]
        points.append(offset[:, :, :, axis] + window + tap)
    images = x.reshape(n, own, channels // own, *image)
    columns = np.zeros((n, own, channels // own, taps, *out))
    which = np.ix_(range(n), range(own), range(channels // own))
    which = tuple(k.reshape(*k.shape, 1, 1, 1) for k in which)
    for corner in np.ndindex(2, 2):
        weight: Any = held
        places = []
        for point, side, size in zip(points, corner, image, strict=True):
            low = np.floor(point)
            place = low.astype(int) + side
            weight = weight * (point - low if side else 1 - (point - low))
            weight = weight * ((place >= 0) & (place < size))
            places.append(np.clip(place, 0, size - 1)[:, :, None])
        columns += weight[:, :, None] * images[(*which, *places)]
    columns = columns.reshape(n, group, channels // group, taps, *out)
    kernels = w.reshape(group, -1, channels // group, taps)
    y = np.einsum("gock,ngckhw->ngohw", kernels, columns).reshape(n, -1, *out)
    return y if b is None else y + b.reshape(-1, 1, 1)


def _line(axis: str, p: float, size: int, corners: int) -> list[tuple[int, float]]:
    """What is read along one axis at −1 ≤ p ≤ 1: places and weights, torch's definitions."""
    mode, padding = axis.split("-")
    p = (p + 1) / 2 * (size - 1) if corners else ((p + 1) * size - 1) / 2
    low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)

    def brought_in(v: float) -> float:
        if padding == "reflection":
            v = abs(v - low) % (2 * (high - low))
            v = low + min(v, 2 * (high - low) - v)
        return v if padding == "zeros" else min(max(v, 0.0), size - 1.0)

    if mode == "cubic":
        first = math.floor(p)
        taps = [(round(brought_in(first + k)), _keys(p - first - k)) for k in (-1, 0, 1, 2)]
    elif mode == "linear":
        p = brought_in(p)
        first = math.floor(p)
        taps = [(first, 1 - p + first), (first + 1, p - first)]
    else:
        taps = [(round(brought_in(p)), 1.0)]
    return [(k, w) for k, w in taps if 0 <= k < size]


def _keys(d: float, a: float = -0.75) -> float:
    d = abs(d)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a


def sampled(x: Any, grid: Any, how: str, corners: int) -> Any:
    n = x.ndim - 2
    out = np.zeros((*grid.shape[:-1], x.shape[1]))
    for place in np.ndindex(grid.shape[:-1]):
        point = grid[place][::-1]
        lines = [_line(how, point[k], x.shape[2 + k], corners) for k in range(n)]
        for taps in itertools.product(*lines):
            weight = math.prod(w for _, w in taps)
            out[place] += weight * x[(place[0], slice(None), *(k for k, _ in taps))]
    return np.moveaxis(out, -1, 1)
