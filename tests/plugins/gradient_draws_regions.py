"""Draws of RoiAlign, MaxRoiPool and DeformConv: regions and places inside and outside of images."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np

from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_cases_regions import deform_convolved, max_roi_pooled, roi_aligned
from tests.plugins.gradient_draws import F32, Draw, Draws, drawn, numbers, shapes, tenths, torch

DRAWS = Draws()


def regions_of(draw: Draw, count: int) -> Any:
    corners = [[draw(tenths(-20, 70)) + 0.03 for _ in range(2)] for _ in range(count)]
    return np.array(
        [[x, y, x + draw(tenths(3, 60)), y + draw(tenths(3, 60))] for x, y in corners], np.float32
    )


@DRAWS.of("RoiAlign")
def roi_align(draw: Draw, operator: str) -> Case:
    count, batch = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    shape = (batch, draw(st.integers(1, 2)), *draw(shapes(2, 2, side=5, smallest=2)))
    regions = regions_of(draw, count)
    index = np.array([draw(st.integers(0, batch - 1)) for _ in range(count)])
    old = draw(st.integers(0, 4)) == 0
    options: dict[str, Any] = {
        "output_height": draw(st.integers(1, 2)),
        "output_width": draw(st.integers(1, 2)),
        "sampling_ratio": draw(st.integers(0, 2)),
        "spatial_scale": draw(st.sampled_from([1.0, 0.5])),
    }
    way = draw(st.sampled_from(["half_pixel", "output_half_pixel"]))
    if old:  # One way, and no name for it; its largest of samples was something else.
        way = "output_half_pixel"
    else:
        options["coordinate_transformation_mode"] = way
        options["mode"] = draw(st.sampled_from(["avg", "avg", "max"]))
    told = options | {"coordinate_transformation_mode": way}
    return drawn(
        f"RoiAlign {options} {regions.tolist()}",
        lambda op, x: op.RoiAlign(x, op.constant(regions, x.dtype), op.constant(index), **options),
        {"x": numbers(draw, shape)},
        oracle=lambda x: roi_aligned(x, regions.astype(float), index, **told),
        since=13 if old else 16,
        until=15 if old else 99,
        dtypes=F32,
    )


@DRAWS.of("MaxRoiPool")
def max_roi_pool(draw: Draw, operator: str) -> Case:
    count, batch = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    shape = (batch, draw(st.integers(1, 2)), *draw(shapes(2, 2, side=6, smallest=1)))
    index = np.array([[draw(st.integers(0, batch - 1))] for _ in range(count)], np.float32)
    regions = np.concatenate([index, regions_of(draw, count)], axis=1)
    pooled = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    scale = draw(st.sampled_from([1.0, 0.5]))
    return drawn(
        f"MaxRoiPool {pooled} {scale} {regions.tolist()}",
        lambda op, x: op.MaxRoiPool(
            x, op.constant(regions, x.dtype), pooled_shape=pooled, spatial_scale=scale
        ),
        {"x": numbers(draw, shape)},
        oracle=lambda x: max_roi_pooled(x, regions, pooled, scale),
        until=21,
        dtypes=F32,
    )


@DRAWS.of("DeformConv")
def deform_conv(draw: Draw, operator: str) -> Case:
    group, own = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    channels, batch = group * own, draw(st.integers(1, 2))
    lists: list[list[int]] = [[], [], [], [], [], [], []]
    for _ in range(2):
        k, s, d, a, b = (
            draw(st.integers(low, high)) for low, high in ((1, 2), (1, 2), (1, 2), (0, 1), (0, 1))
        )
        span = d * (k - 1) + 1
        # onnx's reference, which stands in for runtimes without a kernel, divides by size - 1.
        size = max(2, span - a - b) + draw(st.integers(0, 1))
        for values, value in zip(
            lists, (k, s, d, a, b, size, (size + a + b - span) // s + 1), strict=True
        ):
            values.append(value)
    kernel, strides, dilations, begins, ends, image, out = lists
    options: dict[str, Any] = {
        "group": group,
        "offset_group": own,
        "strides": strides,
        "dilations": dilations,
        "pads": begins + ends,
    }
    taps = kernel[0] * kernel[1]
    arrays = {
        "x": numbers(draw, (batch, channels, *image)),
        "w": numbers(draw, (group, channels // group, *kernel), salt=1),
        "offset": numbers(draw, (batch, own * taps * 2, *out), salt=2),
    }
    if draw(st.booleans()):
        arrays["b"] = numbers(draw, (group,), salt=3)
    if draw(st.booleans()):
        arrays["m"] = numbers(draw, (batch, own * taps, *out), salt=4)

    def formula(op: Any, x: Any, w: Any, offset: Any, b: Any = None, m: Any = None) -> Any:
        return op.DeformConv(x, w, offset, b, m, **options)

    def in_torch(x: Any, w: Any, offset: Any, b: Any = None, m: Any = None) -> Any:
        """By torch's grid_sample, which has an image for each group of offsets."""
        moved = offset.reshape(batch * own, taps, 2, *out)
        places = []
        for axis in (0, 1):
            window = torch.tensor(np.indices(out)[axis] * strides[axis] - begins[axis])
            tap = torch.tensor(np.indices(kernel)[axis].reshape(-1, 1, 1) * dilations[axis])
            places.append((2 * (moved[:, :, axis] + window + tap) + 1) / image[axis] - 1)
        grid = torch.stack(places[::-1], -1).reshape(batch * own, taps * out[0], out[1], 2)
        images = x.reshape(batch * own, channels // own, *image)
        read = torch.nn.functional.grid_sample(images, grid, align_corners=False)
        read = read.reshape(batch, own, channels // own, taps, *out)
        read = read if m is None else read * m.reshape(batch, own, 1, taps, *out)
        columns = read.reshape(batch, group, channels // group * taps, out[0] * out[1])
        y = torch.einsum("gok,ngkp->ngop", w.reshape(group, 1, -1), columns)
        y = y.reshape(batch, group, *out)
        return y if b is None else y + b.reshape(-1, 1, 1)

    return drawn(
        f"DeformConv {options}",
        formula,
        arrays,
        oracle=lambda x, w, offset, b=None, m=None: deform_convolved(x, w, offset, b, m, **options),
        torch=in_torch,
        since=19,
        sized=("w",),
        needs_rank=True,
        dtypes=F32,
    )
