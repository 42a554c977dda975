"""Calls of operators where draws do not reach, and those whose gradient was wrong once.

The modules ``gradient_draws_*.py`` draw all other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core import Array, Tensor
from tests.gradcheck import data
from tests.plugins import window_oracles as oracles
from tests.tracing import NEWEST

F32 = (np.float32,)


@attrs.frozen
class Case:
    """A formula and its inputs; integer and boolean inputs are not differentiated by."""

    name: str
    formula: Callable[..., Tensor]
    arrays: Mapping[str, Array]
    since: int = 13
    until: int = 99
    """The newest opset for which runtimes have a kernel."""
    needs_rank: bool = False
    """Whether the operator, or its rule, must know the number of dimensions."""
    sized: tuple[str, ...] = ()
    """Inputs whose sizes the rule must know: weights."""
    needs_sizes: bool = False
    """Whether the rule must know all sizes while the graph is built."""
    oracle: Callable[..., Array] | None = None
    """The formula in numpy, where no runtime at hand computes it in float64."""
    dtypes: tuple[type, ...] = (np.float64, np.float32)
    reference: bool = False
    """Float64 by onnx's reference: onnxruntime 1.16 computes the operator in float32 inside."""
    torch: Callable[..., Any] | None = None
    """The formula of torch's tensors, where torch has it."""


KNOWN = {field.name for field in attrs.fields(Case)} - {"name", "formula", "arrays"}


def case(name: str, formula: Callable[..., Any], **options: Any) -> Case:
    fields = {k: options.pop(k) for k in KNOWN if k in options}
    return Case(name, formula, options, **fields)


def call(name: str, **given: Any) -> Case:
    """One call: of the operator that the name begins with, of arrays, with attributes."""
    fields = {k: given.pop(k) for k in KNOWN if k in given}
    arrays = {k: a for k, a in given.items() if isinstance(a, np.ndarray | np.generic)}
    attributes = {k: value for k, value in given.items() if k not in arrays}
    op_type = name.partition("-")[0]
    return Case(name, lambda op, **xs: op(op_type, *xs.values(), **attributes), arrays, **fields)


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
    resize("linear-plain", (3, 4), [2, 0.8], mode="linear"),
    resize("linear-grows-by-less-than-one", (1, 1, 2, 2), [1, 1, 1.25, 2], mode="linear"),
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


_KERNEL: dict[str, Any] = {"dtypes": F32, "needs_rank": True}


def conv(label: str, x: Sequence[int], w: Sequence[int], **options: Any) -> Case:
    pads = options.pop("oracle_pads", options.get("pads"))
    plain = {k: v for k, v in options.items() if k not in ("auto_pad", "pads", "kernel_shape")}
    arrays = {"x": data(*x), "w": data(*w, seed=1), "b": data(w[0], seed=2)}
    oracle = lambda x, w, b: oracles.conv(x, w, b, pads=pads, **plain)  # noqa: E731
    return call(f"Conv-{label}", **arrays, **options, **_KERNEL, oracle=oracle)


_ODD = ((1, 1, 6, 7), (2, 1, 3, 4))
_STRIDES = {"strides": [2, 3], "kernel_shape": [3, 4]}
CONV = [
    conv("1d", (2, 2, 7), (3, 2, 3)),
    conv("depthwise-wide", (1, 2, 3, 18), (2, 1, 3, 3), pads=[1, 1, 1, 1], group=2),
    conv("1x1", (2, 3, 3, 4), (2, 3, 1, 1), kernel_shape=[1, 1]),
    # More elements of the kernel than places, as in the gradient of a kernel.
    conv(
        *("few-places", (2, 4, 5, 3, 6), (4, 2, 4, 1, 3)),
        **{"group": 2, "pads": [1, 0, 0, 0, 0, 1], "strides": [2, 1, 2], "dilations": [1, 1, 2]},
    ),
    conv("few-places-1d", (2, 2, 6), (3, 2, 5), pads=[1, 0]),
    # Places that no window covers, at the end of the padding or of the image; a window of padding.
    conv("rest-of-padding", (2, 2, 6, 8), (3, 2, 3, 2), pads=[1, 0, 1, 1], strides=[2, 3]),
    conv("rest-of-image", (2, 2, 6, 7, 6), (3, 2, 3, 2, 3), strides=[2, 3, 2]),
    conv("window-of-padding", (2, 2, 2), (3, 2, 2), pads=[4, 0], strides=[5]),
    # Automatic padding depends on the size of the kernel, which a user must know.
    *(
        conv(f"same-{label}", *sizes, auto_pad=way, **options)
        for label, way, sizes, options in (
            (
                "upper",
                "SAME_UPPER",
                ((1, 2, 5, 5), (2, 2, 2, 2)),
                {"kernel_shape": [2, 2], "oracle_pads": [0, 0, 1, 1]},
            ),
            ("upper-strides", "SAME_UPPER", _ODD, {**_STRIDES, "oracle_pads": [0, 1, 1, 2]}),
            ("lower-strides", "SAME_LOWER", _ODD, {**_STRIDES, "oracle_pads": [1, 2, 0, 1]}),
        )
    ),
]


def statistics(x: Array, m: Array, v: Array) -> Array:
    """Both running statistics, each entry of another weight."""
    axes = (0, *range(2, x.ndim))
    new = 0.8 * m + 0.2 * x.mean(axes), 0.8 * v + 0.2 * x.var(axes)
    return np.array([1.0, 2.0, 3.0]) * (new[0] + 2 * new[1])


def updated(op: Any, x: Any, m: Any, v: Any) -> Any:
    one, weights = (op.CastLike(op.constant(np.array(n, "f4")), x) for n in ([1] * 3, [1, 2, 3]))
    settings = {"training_mode": 1, "momentum": 0.8, "outputs": 3}
    _, mean, variance = op.BatchNormalization(x, one, one, m, v, **settings)
    return weights * (mean + 2 * variance)


_x, _image = data(2, 3), data(2, 3, 2, 2)

OTHERS = [
    case("Pow--1", lambda op, x: x**-1, x=data(2, 3, low=0.5, high=2)),
    case("Concat-one", lambda op, x: op.Concat(x, op.Abs(op.Floor(x)), axis=0), x=_x),
    *(
        case(f"Slice-{label}", lambda op, x, args=args: op.Slice(x, *args), x=data(4, 5))
        for label, args in (
            ("back", ([3], [-(2**40)], [1], [-1])),
            ("both", ([2, -1], [0, 0], [0, -1], [-1, -1])),
        )
    ),
    call(
        "MaxPool-column-major",
        oracle=lambda x: oracles.pool("max", x, (2, 2)),
        **{"x": data(1, 2, 4, 4), "kernel_shape": [2, 2], "storage_order": 1, "dtypes": F32},
    ),
    case(
        "BatchNormalization-statistics",
        updated,
        **{
            "x": _image,
            "m": data(3, seed=3, low=-0.5, high=0.5),
            "v": data(3, seed=4, low=0.5, high=2),
            "oracle": statistics,
            "needs_rank": True,
            "since": 15,
        },
    ),
    case(
        "Col2Im-given",
        lambda op, x, size, k: op.Col2Im(x, size, k, strides=[1, 2], pads=[0, 1, 1, 0]),
        **{"x": data(1, 6, 8), "size": np.array([4, 5]), "k": np.array([2, 3])},
        **{"since": 18, "dtypes": F32},
    ),
    case("DFT-padded", lambda op, x: op.DFT(x, axis=1, dft_length=6), x=data(2, 4, 1), since=17),
    # What need not be constant: the step and the length of frames, the axis, the length.
    case(
        "STFT-given",
        lambda op, x, hop, n: op.STFT(x, hop, None, n, onesided=1),
        **{"x": data(2, 9, 1), "hop": np.array(2), "n": np.array(5)},
        **{"since": 17, "needs_rank": True},
    ),
    case(
        "STFT-given-step",
        lambda op, x, w, hop: op.STFT(x, hop, w),
        **{"x": data(1, 8, 1), "w": data(3, low=0.3, high=1), "hop": np.array(3)},
        **{"since": 17, "needs_rank": True},
    ),
    *(
        case(
            f"DFT-given-{label}",
            lambda op, x, a, n=None, o=options: op.DFT(x, n, a, **o),
            **{"x": data(*shape), "a": np.array(axis), **({"n": np.array(n)} if n else {})},
            since=20,
        )
        for label, shape, axis, n, options in (
            ("front", (4, 2, 2), 0, None, {"inverse": 1}),
            ("counted-back", (2, 5, 1), -2, None, {}),
            *(
                (f"real-{n}", (2, n // 2 + 1, 2), 1, n, {"inverse": 1, "onesided": 1})
                for n in (6, 7)
                if NEWEST >= 26  # older runtimes refuse to make a real signal of half a spectrum
            ),
        )
    ),
]

CASES = [*RESIZE, *CONV, *OTHERS]
