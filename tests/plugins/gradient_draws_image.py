"""Draws of the operators that resize images, cut regions out or read them between their points."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np

from ortflex_core import Array
from tests.gradcheck import forward
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import F32, Draw, Draws, drawn, numbers, shapes, tenths, torch
from tests.plugins.window_oracles import deform_convolved, max_roi_pooled, roi_aligned, sampled
from tests.tracing import NEWEST

DRAWS = Draws()


def linear(formula: Any, shape: tuple[int, ...], opset: int) -> Any:
    """The formula in float64, as the matrix that the installed runtime multiplies with.

    Runtimes differ in what they read at a tie; the gradient must be of what this one computes.
    """
    zeros = np.zeros(shape, np.float32)
    function = forward(formula, {"x": zeros}, opset)
    columns = []
    origin = function({"x": zeros})
    for k in range(zeros.size):
        unit = zeros.copy()
        unit.reshape(-1)[k] = 1
        columns.append((function({"x": unit}) - origin).astype(float))
    matrix = np.stack(columns, axis=-1)
    return lambda x: origin + matrix @ x.reshape(-1)


PLACES = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "tf_crop_and_resize"]


@DRAWS.of("Resize")
def resize(draw: Draw, operator: str) -> Case:
    mode = draw(st.sampled_from(["nearest", "linear", "cubic"]))
    n = 2 if mode == "cubic" else draw(st.integers(1, 3))
    sizes = draw(shapes(n, n, side=4))
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), *sizes)
    place = draw(st.sampled_from(PLACES))
    options: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": place}
    since = 13
    if mode == "nearest":
        rounded = ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]
        options["nearest_mode"] = draw(st.sampled_from(rounded))
    if mode == "cubic" and draw(st.booleans()):
        options["cubic_coeff_a"] = -draw(tenths(3, 9))
    if mode == "cubic" and place != "tf_crop_and_resize" and draw(st.booleans()):
        options["exclude_outside"] = 1
    inputs: dict[str, Any] = {}
    axes = list(range(len(shape)))
    if draw(st.integers(0, 3)) == 0 and place != "tf_crop_and_resize":
        axes, since = list(draw(st.permutations(range(2, 2 + n)))), 18
        options["axes"] = axes
    target = [d if k < 2 else draw(st.integers(1, 6)) for k, d in enumerate(shape)]
    if draw(st.booleans()):
        inputs["sizes"] = np.array([target[a] for a in axes])
    else:
        # Sizes that are whole even after rounding, so that no one can be of two minds.
        scales = [1.0 if a < 2 else (target[a] + 0.25) / shape[a] for a in axes]
        inputs["scales"] = np.array(scales, np.float32)
    if place == "tf_crop_and_resize":
        rest = [(draw(tenths(-3, 4)) + 0.03, draw(tenths(6, 13)) + 0.03) for _ in range(n)]
        inputs["roi"] = np.array(
            [0, 0, *(a for a, _ in rest), 1, 1, *(b for _, b in rest)], np.float32
        )
        options["extrapolation_value"] = 1.5

    def formula(op: Any, x: Any) -> Any:
        return op.Resize(x, **inputs, **options)

    fields = {}
    if mode != "nearest" and "axes" not in options and "sizes" in inputs and n < 3:
        name = "bicubic" if mode == "cubic" else ["linear", "bilinear"][n - 1]
        usual = not {"cubic_coeff_a", "exclude_outside"} & set(options)
        # Of a single place each has its own idea.
        if "half_pixel" in place and usual and all(t > 1 for t in target[2:]):
            fields["torch"] = lambda x: torch.nn.functional.interpolate(
                x, target[2:], mode=name, align_corners=False
            )
    opset = min(max(since, 13), NEWEST)
    known = {"oracle": linear(formula, shape, opset)} if since <= NEWEST else {}
    return drawn(
        f"Resize {options} {inputs}",
        formula,
        {"x": numbers(draw, shape)},
        since=since,
        needs_rank=True,
        dtypes=F32,
        **known,
        **fields,
    )


@DRAWS.of("GridSample")
def grid_sample(draw: Draw, operator: str) -> Case:
    mode = draw(st.sampled_from(["linear", "nearest", "cubic"]))
    n = 2 if mode == "cubic" else draw(st.integers(2, 3))
    padding = draw(st.sampled_from(["zeros", "border", "reflection"]))
    corners = draw(st.integers(0, 1))
    batch, count = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    sizes, places = draw(shapes(n, n, side=4, smallest=2)), draw(shapes(n, n, side=2))
    # Beyond the second turn onnxruntime's own reflection of 1.16 goes astray.
    points = numbers(draw, (batch, *places, n), -1.6, 1.6, salt=1)
    new = n == 3 or draw(st.booleans())
    name = mode if new else {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    options = {"mode": name, "padding_mode": padding, "align_corners": corners}
    arrays = {"x": numbers(draw, (batch, count, *sizes)), "grid": points}
    held = points.astype(np.float32)
    if mode == "nearest":  # the grid has no slope
        arrays.pop("grid")

    def formula(op: Any, x: Any, grid: Any = None) -> Any:
        return op.GridSample(x, op.constant(held, x.dtype) if grid is None else grid, **options)

    def oracle(x: Array, grid: Any = None) -> Array:
        given = held.astype(float) if grid is None else grid
        return sampled(x, given, f"{mode}-{padding}", corners)  # type: ignore[no-any-return]

    def in_torch(x: Any, grid: Any = None) -> Any:
        given = torch.tensor(held, dtype=x.dtype) if grid is None else grid
        how = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
        return torch.nn.functional.grid_sample(x, given, how, padding, bool(corners))

    return drawn(
        f"GridSample {options}",
        formula,
        arrays,
        oracle=oracle,
        torch=in_torch,
        since=20 if new else 16,
        until=99 if new else 19,
        needs_rank=True,
        dtypes=F32,
    )


@DRAWS.of("AffineGrid")
def affine_grid(draw: Draw, operator: str) -> Case:
    n, corners = draw(st.integers(2, 3)), draw(st.integers(0, 1))
    front = [draw(st.integers(1, 2)) for _ in range(2)]
    size = [*front, *draw(shapes(n, n, side=3, smallest=2))]
    return drawn(
        f"AffineGrid {size} {corners}",
        lambda op, t: op.AffineGrid(t, size, align_corners=corners),
        {"t": numbers(draw, (size[0], n, n + 1))},
        since=20,
        torch=lambda t: torch.nn.functional.affine_grid(t, size, align_corners=bool(corners)),
    )


@DRAWS.of("Col2Im")
def col2im(draw: Draw, operator: str) -> Case:
    batch, count = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rows = []
    for _ in range(2):
        k, s, d, a, b = (
            draw(st.integers(low, high)) for low, high in ((1, 3), (1, 2), (1, 2), (0, 1), (0, 1))
        )
        span = d * (k - 1) + 1
        size = max(1, span - a - b) + draw(st.integers(0, 3))
        rows.append((k, s, d, (a, b), size, (size + a + b - span) // s + 1))
    kernel, strides, dilations, pads, image, blocks = map(list, zip(*rows, strict=True))
    flat = [p[0] for p in pads] + [p[1] for p in pads]
    options = {"strides": strides, "dilations": dilations, "pads": flat}
    shape = (batch, count * int(np.prod(kernel)), int(np.prod(blocks)))

    def formula(op: Any, x: Any) -> Any:
        return op.Col2Im(x, image, kernel, **options)

    def in_torch(x: Any) -> Any:
        whole = [i + a + b for i, (a, b) in zip(image, pads, strict=True)]
        y = torch.nn.functional.fold(x, whole, kernel, dilations, 0, strides)
        return y[(..., *(slice(a, a + i) for i, (a, _) in zip(image, pads, strict=True)))]

    return drawn(
        f"Col2Im {image} {kernel} {options}",
        formula,
        {"x": numbers(draw, shape)},
        since=18,
        dtypes=F32,
        torch=in_torch,
        **({"oracle": linear(formula, shape, 18)} if NEWEST >= 18 else {}),
    )


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
    rows = []
    for _ in range(2):
        k, s, d, a, b = (
            draw(st.integers(low, high)) for low, high in ((1, 2), (1, 2), (1, 2), (0, 1), (0, 1))
        )
        span = d * (k - 1) + 1
        # onnx's reference, which stands in for runtimes without a kernel, divides by size - 1.
        size = max(2, span - a - b) + draw(st.integers(0, 1))
        rows.append((k, s, d, a, b, size, (size + a + b - span) // s + 1))
    kernel, strides, dilations, begins, ends, image, out = map(list, zip(*rows, strict=True))
    options: dict[str, Any] = {"group": group, "offset_group": own, "strides": strides}
    options |= {"dilations": dilations, "pads": begins + ends}
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
