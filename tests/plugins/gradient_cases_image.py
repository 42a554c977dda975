"""Cases of operators on images: onnx's reference computes them in float64, onnxruntime in float32."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from tests.gradcheck import data
from tests.plugins.gradient_cases import Case, call, case

F32 = (np.float32,)


def resize(
    label: str, shape: tuple[int, ...], scales: Any = None, sizes: Any = None, **options: Any
) -> Case:
    roi = options.pop("roi", None)
    since, needs_sizes = options.pop("since", 13), options.pop("needs_sizes", False)
    places = {"roi": roi, "scales": scales, "sizes": sizes}
    floats = {k: np.array(v, np.float32) for k, v in places.items() if v is not None}
    if sizes is not None:
        floats["sizes"] = np.array(sizes)
    return case(
        f"Resize-{label}",
        lambda op, x: op.Resize(x, **floats, **options),
        **{"x": data(*shape), "dtypes": F32},
        **{"since": since, "needs_rank": True, "needs_sizes": needs_sizes},
    )


RESIZE = [
    *(
        resize(f"{mode}-{place}", (1, 1, 4, 3), [1, 1, 1.5, 2], **how)
        for mode in ("nearest", "linear", "cubic")
        for place in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
        for how in ({"mode": mode, "coordinate_transformation_mode": place},)
    ),
    *(
        resize(
            f"nearest-{rounded}",
            (1, 1, 5),
            [1, 1, 0.7],
            **{"nearest_mode": rounded, "coordinate_transformation_mode": "asymmetric"},
        )
        for rounded in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    ),
    resize(
        "repeats",
        (1, 2, 2, 3),
        [1, 1, 2, 3],
        **{"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"},
    ),
    # One scale of all axes that the sizes do not fit: the new sizes are rounded, up or down.
    *(
        resize(
            f"kept-{policy}-{mode}-{place}",
            (1, 1, 3, 5),
            sizes=[2, 4] if policy == "not_larger" else [4, 9],
            **{"axes": [2, 3], "keep_aspect_ratio_policy": policy, "since": 18},
            **{"mode": mode, "coordinate_transformation_mode": place},
        )
        for policy in ("not_larger", "not_smaller")
        for mode in ("nearest", "linear", "cubic")
        for place in ("half_pixel", "asymmetric")
    ),
    resize("repeats-half-pixel", (2, 1, 3), sizes=[2, 1, 9]),
    resize("repeats-3d", (1, 1, 2, 1, 2), sizes=[1, 1, 4, 3, 4]),
    resize("batch", (2, 2), [2, 1.5]),
    resize("linear-sizes", (2, 1, 4, 3), sizes=[2, 1, 3, 5], mode="linear"),
    resize("linear-3d", (1, 1, 2, 3, 2), [1, 1, 2, 1.5, 2], mode="linear"),
    resize("linear-plain", (3, 4), [2, 0.8], mode="linear"),
    resize("linear-grows-by-less-than-one", (1, 1, 2, 2), [1, 1, 1.25, 2], mode="linear"),
    resize("cubic-down", (1, 1, 5, 6), sizes=[1, 1, 3, 3], mode="cubic"),
    resize("cubic-excluded", (1, 1, 3, 3), [1, 1, 2, 2], mode="cubic", exclude_outside=1),
    resize("cubic-coefficient", (1, 1, 3, 3), [1, 1, 2, 2], mode="cubic", cubic_coeff_a=-0.5),
    resize(
        "symmetric",
        (1, 1, 4, 5),
        [1, 1, 0.6, 0.6],
        **{"since": 19, "mode": "linear"},
        coordinate_transformation_mode="half_pixel_symmetric",
    ),
    resize(
        "crop",
        (1, 1, 4, 4),
        sizes=[1, 1, 3, 3],
        roi=[0, 0, 0.1, 0.2, 1, 1, 0.8, 1.4],
        **{"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"},
        extrapolation_value=3.0,
    ),
    resize("axes", (1, 2, 3, 4), [2.0, 0.5], axes=[3, 2], since=18, mode="linear"),
    resize("antialias", (1, 1, 6, 6), [1, 1, 0.5, 0.7], antialias=1, since=18, mode="linear"),
    resize("antialias-cubic", (1, 1, 6, 6), [1, 1, 0.5, 0.5], antialias=1, since=18, mode="cubic"),
    resize(
        "aspect",
        (1, 1, 4, 6),
        sizes=[6, 12],
        **{"axes": [2, 3], "since": 18, "mode": "linear"},
        **{"keep_aspect_ratio_policy": "not_larger", "needs_sizes": True},
    ),
]


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


_points = data(2, 2, 3, 2, low=-0.9, high=0.9)
_outside = data(1, 2, 3, 2, low=-1.7, high=1.7)


def grid(label: str, x: tuple[int, ...], points: Any, since: int = 16, **options: Any) -> Case:
    mode = options.get("mode", "linear").removeprefix("bi")
    how = f"{mode}-{options.get('padding_mode', 'zeros')}"
    return case(
        f"GridSample-{label}",
        lambda op, x, grid: op.GridSample(x, grid, **options),
        oracle=lambda x, grid: sampled(x, grid, how, options.get("align_corners", 0)),
        **{"x": data(*x), "grid": points, "since": since, "until": 19 if since == 16 else 99},
        needs_rank=True,
        dtypes=F32,
    )


GRIDS = [
    *(
        grid(f"{padding}-{corners}", (1, 2, 3, 4), _outside, **how)
        for padding in ("zeros", "border", "reflection")
        for corners in (0, 1)
        for how in ({"padding_mode": padding, "align_corners": corners},)
    ),
    grid("batch", (2, 1, 4, 3), _points),
    *(
        grid(f"cubic-{padding}", (1, 1, 4, 4), _outside, mode="bicubic", padding_mode=padding)
        for padding in ("zeros", "border", "reflection")
    ),
    grid("linear", (1, 1, 3, 3), _outside, since=20),
    grid("cubic", (1, 1, 4, 4), _outside, since=20, mode="cubic"),
    grid("3d", (1, 1, 2, 3, 2), data(1, 1, 2, 2, 3, low=-0.8, high=0.8), since=20),
    case(
        "GridSample-nearest",
        lambda op, x: op.GridSample(x, op.CastLike(op.constant(_outside), x), mode="nearest"),
        oracle=lambda x: sampled(x, _outside, "nearest-zeros", 0),
        **{"x": data(1, 2, 3, 4), "since": 16, "until": 19, "needs_rank": True, "dtypes": F32},
    ),
]

BLOCKS = [
    case("DepthToSpace", lambda op, x: op.DepthToSpace(x, blocksize=2), x=data(1, 8, 1, 2)),
    call("DepthToSpace-CRD", x=data(2, 8, 1, 2), blocksize=2, mode="CRD"),
    case("SpaceToDepth", lambda op, x: op.SpaceToDepth(x, blocksize=2), x=data(1, 2, 4, 2)),
    *(
        case(
            f"CenterCropPad-{label}",
            lambda op, x, shape=shape, axes=axes: op.CenterCropPad(x, shape, axes=axes),
            **{"x": data(4, 5), "since": 18},
        )
        for label, shape, axes in (
            ("crop", [1, 2], None),
            ("pad", [7, 6], None),
            ("both", [7, 2], None),
            ("axes", [2], [-1]),
            ("odd", [3, 8], [1, 0]),
        )
    ),
    case(
        "Col2Im",
        lambda op, x: op.Col2Im(x, [4, 5], [2, 3], strides=[1, 2], pads=[0, 1, 1, 0]),
        **{"x": data(1, 6, 8), "since": 18, "dtypes": F32},
    ),
    case(
        "Col2Im-dilations",
        lambda op, x: op.Col2Im(x, [5, 4], [2, 2], dilations=[2, 1]),
        **{"x": data(2, 8, 9), "since": 18, "dtypes": F32},
    ),
    case(
        "Col2Im-given",
        lambda op, x, size, k: op.Col2Im(x, size, k, strides=[1, 2], pads=[0, 1, 1, 0]),
        **{"x": data(1, 6, 8), "size": np.array([4, 5]), "k": np.array([2, 3])},
        **{"since": 18, "dtypes": F32},
    ),
    *(
        case(
            f"AffineGrid-{len(size) - 2}d-{corners}",
            lambda op, t, n=size, c=corners: op.AffineGrid(t, n, align_corners=c),
            **{"t": data(2, len(size) - 2, len(size) - 1), "since": 20},
        )
        for size in ([2, 1, 3, 2], [2, 1, 3, 2, 4])
        for corners in (0, 1)
    ),
]


CASES = [*RESIZE, *GRIDS, *BLOCKS]
