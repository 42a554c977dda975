"""Windows and regions of images in numpy: convolutions, pooling, what is read between points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ortflex_core import Array

Ints = Sequence[int]


def placed(
    n: int, strides: Ints | None = None, dilations: Ints | None = None, pads: Ints | None = None
) -> tuple[Ints, Ints, Ints]:
    """How windows of ``n`` axes lie: next to each other and without padding, by default."""
    return strides or [1] * n, dilations or [1] * n, pads or [0] * 2 * n


def counts(sizes: Ints, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints) -> list[int]:
    n = len(kernel)
    rows = zip(sizes, kernel, strides, dilations, pads[:n], pads[n:], strict=True)
    return [(d + a + b - e * (k - 1) - 1) // s + 1 for d, k, s, e, a, b in rows]


def taps(
    x: Array, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints, out: Ints, fill: float
) -> Iterator[tuple[tuple[int, ...], Array]]:
    """For each place of the kernel what lies there in every window."""
    n = len(kernel)
    # Room at the end for windows that reach beyond the padding.
    rows = zip(out, strides, dilations, kernel, strict=True)
    reach = [(o - 1) * s + d * (k - 1) + 1 for o, s, d, k in rows]
    ends = [max(r - size - a, 0) for r, size, a in zip(reach, x.shape[2:], pads[:n], strict=True)]
    whole = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], ends, strict=True)], constant_values=fill)
    for place in itertools.product(*map(range, kernel)):
        at = zip(place, dilations, strides, out, strict=True)
        cut = [slice(k * d, k * d + s * (o - 1) + 1, s) for k, d, s, o in at]
        yield place, whole[(slice(None), slice(None), *cut)]


def conv(
    x: Array, w: Array, b: Array | None = None, *, group: int = 1, **given: Ints | None
) -> Array:
    kernel, n = w.shape[2:], w.ndim - 2
    strides, dilations, pads = placed(n, **given)
    out = counts(x.shape[2:], kernel, strides, dilations, pads)
    y = np.zeros((x.shape[0], group, w.shape[0] // group, *out))
    weights = w.reshape(group, -1, *w.shape[1:])
    for place, part in taps(x, kernel, strides, dilations, pads, out, 0.0):
        parts = part.reshape(len(x), group, -1, *out)
        y += np.einsum("ngc...,gmc->ngm...", parts, weights[(..., *place)])
    y = y.reshape(x.shape[0], w.shape[0], *out)
    return y if b is None else y + b.reshape(-1, *[1] * n)


def conv_transpose(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    more: Ints | None = None,
    group: int = 1,
    **given: Ints | None,
) -> Array:
    kernel, n, sizes = w.shape[2:], w.ndim - 2, x.shape[2:]
    strides, dilations, pads = placed(n, **given)
    rows = zip(sizes, strides, kernel, dilations, more or [0] * n, strict=True)
    full = [s * (o - 1) + e + d * (k - 1) + 1 for o, s, k, d, e in rows]
    y = np.zeros((len(x), group, w.shape[1], *full))
    parts = x.reshape(len(x), group, -1, *sizes)
    weights = w.reshape(group, -1, *w.shape[1:])
    for place in itertools.product(*map(range, kernel)):
        at = zip(place, dilations, strides, sizes, strict=True)
        cut = [slice(k * d, k * d + s * (o - 1) + 1, s) for k, d, s, o in at]
        y[(..., *cut)] += np.einsum("ngc...,gcm->ngm...", parts, weights[(..., *place)])
    y = y.reshape(len(x), -1, *full)
    y = y[(..., *(slice(a, f - e) for a, e, f in zip(pads[:n], pads[n:], full, strict=True)))]
    return y if b is None else y + b.reshape(-1, *[1] * n)


def pool(
    kind: str,
    x: Array,
    kernel: Ints,
    *,
    out: Ints | None = None,
    p: int = 2,
    **given: Ints | None,
) -> Array:
    """``kind``: max, mean, padded (a mean that counts the padding), norm."""
    n = len(kernel)
    strides, dilations, pads = placed(n, **given)
    out = out or counts(x.shape[2:], kernel, strides, dilations, pads)

    def stacked(values: Array, fill: float) -> Any:
        parts = taps(values, kernel, strides, dilations, pads, out, fill)
        return np.stack([part for _, part in parts])

    if kind == "max":
        return stacked(x, -np.inf).max(axis=0)
    if kind == "norm":
        return (abs(stacked(x, 0.0)) ** p).sum(axis=0) ** (1 / p)
    total = stacked(x, 0.0).sum(axis=0)
    if kind == "mean":
        return total / stacked(np.ones_like(x), 0.0).sum(axis=0)
    sides = [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)]
    inside = np.pad(np.ones_like(x), sides, constant_values=1.0)
    rows = taps(inside, kernel, strides, dilations, [0] * 2 * n, out, 0.0)
    return total / np.stack([part for _, part in rows]).sum(axis=0)


# Regions of images, images read between their points, convolutions with places of their own -----------


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
