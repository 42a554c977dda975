"""Regions of images, and a convolution that reads at places of its own; each written in numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ortflex_core import Array
from tests.gradcheck import data
from tests.plugins.gradient_cases import Case, case

F32 = (np.float32,)


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


_REGIONS = np.array([[0.5, 1, 6, 9], [3, 2, 11, 4.5]])
_BATCH = np.array([1, 0])
_SIZES = {"output_height": 2, "output_width": 2, "spatial_scale": 0.5}
_POOLED = np.array([[1, 0, 1, 4, 3.5], [0, -2, 2, 3, 9], [0, 9, 9, 12, 12]])


def _align(label: str, since: int = 16, **options: Any) -> Case:
    # Before opset 16 there was one way, and no name for it.
    way = {"coordinate_transformation_mode": "output_half_pixel"} if since < 16 else {}
    regions = _REGIONS.astype(np.float32)
    return case(
        f"RoiAlign-{label}",
        lambda op, x: op.RoiAlign(x, op.constant(regions, x.dtype), op.constant(_BATCH), **options),
        x=data(2, 2, 4, 5),
        oracle=lambda x: roi_aligned(x, _REGIONS, _BATCH, **options, **way),
        **{"since": since, "dtypes": F32, "until": 15 if since < 16 else 99},
    )


def _deformed(label: str, bias: bool, mask: bool, **options: Any) -> Case:
    own = options.get("offset_group", 1)
    arrays = {
        "x": data(1, 4, 4, 3),
        "w": data(2, 4 // options.get("group", 1), 2, 2, seed=1),
        "offset": data(1, own * 8, 3, 2, seed=2),
    }
    arrays |= {"b": data(2, seed=3)} if bias else {}
    arrays |= {"m": data(1, own * 4, 3, 2, seed=4)} if mask else {}

    def formula(op: Any, x: Any, w: Any, offset: Any, b: Any = None, m: Any = None) -> Any:
        return op.DeformConv(x, w, offset, b, m, **options)

    return case(
        f"DeformConv-{label}",
        formula,
        **arrays,
        oracle=lambda x, w, offset, b=None, m=None: deform_convolved(x, w, offset, b, m, **options),
        **{"since": 19, "dtypes": F32, "sized": ("w",), "needs_rank": True},
    )


CASES = [
    *(
        _align(way, coordinate_transformation_mode=way, sampling_ratio=2, **_SIZES)
        for way in ("half_pixel", "output_half_pixel")
    ),
    _align("adaptive", **_SIZES),
    _align("max", mode="max", sampling_ratio=2, **_SIZES),
    _align("adaptive-max", mode="max", **_SIZES),
    _align("before-16", since=13, sampling_ratio=2, **_SIZES),
    case(
        "MaxRoiPool",
        lambda op, x: op.MaxRoiPool(
            *(x, op.constant(_POOLED.astype(np.float32), x.dtype)),
            **{"pooled_shape": [2, 3], "spatial_scale": 1.0},
        ),
        x=data(2, 2, 4, 5),
        oracle=lambda x: max_roi_pooled(x, _POOLED, [2, 3]),
        **{"dtypes": F32, "until": 21},
    ),
    _deformed("plain", False, False),
    _deformed("grouped", True, False, group=2, strides=[1, 1]),
    _deformed("masked", True, True, offset_group=2, group=2),
]
