"""Cases of convolutions and pooling; the oracles are numpy, the gradients run in float32.

onnxruntime has no float64 kernels for most of these operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.gradcheck import data
from tests.plugins import window_oracles as oracles
from tests.plugins.gradient_cases import Case, call, case

KERNELS: dict[str, Any] = {"dtypes": (np.float32,), "needs_rank": True}
F32 = (np.float32,)


def conv(label: str, x: Sequence[int], w: Sequence[int], **options: Any) -> Case:
    pads = options.pop("oracle_pads", options.get("pads"))
    plain = {k: v for k, v in options.items() if k not in ("auto_pad", "pads", "kernel_shape")}
    arrays = {"x": data(*x), "w": data(*w, seed=1), "b": data(w[0], seed=2)}
    oracle = lambda x, w, b: oracles.conv(x, w, b, pads=pads, **plain)  # noqa: E731
    return call(f"Conv-{label}", **arrays, **options, **KERNELS, oracle=oracle)


_ODD = ((1, 1, 6, 7), (2, 1, 3, 4))
_STRIDES = {"strides": [2, 3], "kernel_shape": [3, 4]}
CONV = [
    conv("1d", (2, 2, 7), (3, 2, 3)),
    conv("1d-all", (2, 4, 9), (6, 2, 2), strides=[2], dilations=[2], pads=[2, 1], group=2),
    conv("2d", (2, 2, 5, 4), (3, 2, 3, 2)),
    conv("2d-pads", (1, 2, 4, 4), (2, 2, 3, 3), pads=[1, 0, 2, 1]),
    conv("2d-strides", (2, 2, 6, 5), (2, 2, 3, 2), strides=[2, 3], pads=[1, 1, 0, 1]),
    conv("2d-leftover", (1, 1, 8, 7), (2, 1, 3, 2), strides=[3, 3]),
    conv("2d-dilations", (1, 2, 6, 7), (2, 2, 2, 3), dilations=[3, 2]),
    conv("2d-groups", (2, 4, 4, 4), (6, 2, 2, 2), group=2, pads=[1, 1, 1, 1]),
    conv("depthwise", (2, 3, 5, 5), (3, 1, 3, 3), group=3, pads=[1, 1, 1, 1]),
    conv("depthwise-rows", (2, 3, 6, 7), (3, 1, 2, 3), strides=[2, 2], pads=[1, 0, 2, 1], group=3),
    conv(
        "depthwise-dilated",
        *((2, 2, 6, 7), (2, 1, 3, 2)),
        **{"dilations": [2, 3], "pads": [0, 2, 1, 0], "group": 2},
    ),
    conv("depthwise-wide", (1, 2, 3, 18), (2, 1, 3, 3), pads=[1, 1, 1, 1], group=2),
    conv("depthwise-strides", (2, 2, 5, 6), (4, 1, 3, 3), group=2, strides=[2, 2]),
    conv("1x1", (2, 3, 3, 4), (2, 3, 1, 1), kernel_shape=[1, 1]),
    conv("1x1-strides", (2, 3, 4, 5), (2, 3, 1, 1), strides=[2, 2]),
    conv("1x1-groups", (2, 4, 3, 2), (2, 2, 1, 1), group=2),
    conv("1x1-pads", (1, 2, 3, 2), (2, 2, 1, 1), pads=[1, 0, 0, 2]),
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
    conv("valid", (1, 1, 6, 5), (1, 1, 3, 2), auto_pad="VALID", strides=[2, 2]),
    conv("3d", (1, 2, 3, 4, 3), (2, 2, 2, 2, 2), pads=[0, 1, 0, 1, 0, 1], strides=[1, 2, 1]),
]


def transposed(label: str, x: Sequence[int], w: Sequence[int], **options: Any) -> Case:
    pads = options.pop("oracle_pads", options.get("pads"))
    group = options.get("group", 1)
    known = ("strides", "dilations", "group")
    plain = {k: v for k, v in options.items() if k in known}
    more = options.get("output_padding")
    arrays = {"x": data(*x), "w": data(*w, seed=1), "b": data(w[1] * group, seed=2)}
    oracle = lambda x, w, b: oracles.conv_transpose(x, w, b, pads=pads, more=more, **plain)  # noqa: E731
    return call(f"ConvTranspose-{label}", **arrays, **options, **KERNELS, oracle=oracle)


TRANSPOSED = [
    transposed("1d", (2, 2, 4), (2, 3, 3), strides=[2]),
    transposed("2d", (2, 2, 3, 3), (2, 3, 2, 3)),
    transposed(
        "2d-depthwise", (2, 3, 3, 4), (3, 1, 3, 2), group=3, strides=[2, 2], pads=[1, 0, 0, 1]
    ),
    transposed("2d-up", (1, 2, 3, 2), (2, 2, 2, 2), strides=[2, 2]),
    transposed(
        "2d-all",
        (2, 2, 3, 4),
        (2, 2, 3, 2),
        **{"strides": [2, 3], "pads": [1, 0, 0, 1], "output_padding": [1, 2]},
    ),
    transposed("2d-dilations", (1, 2, 3, 3), (2, 1, 2, 2), dilations=[2, 3], pads=[1, 1, 0, 2]),
    transposed("2d-groups", (2, 4, 3, 2), (4, 3, 2, 2), group=2, strides=[2, 1]),
    transposed("depthwise", (1, 3, 3, 3), (3, 1, 3, 3), group=3, strides=[2, 2], pads=[1] * 4),
    transposed("1x1", (2, 3, 2, 3), (3, 2, 1, 1)),
    transposed("3d", (1, 2, 2, 2, 3), (2, 1, 2, 2, 2), strides=[1, 2, 2]),
]


def pool(
    op_type: str, label: str, kind: str, x: Sequence[int], kernel: Sequence[int], **options: Any
) -> Case:
    out, pads = options.pop("out", None), options.pop("oracle_pads", options.get("pads"))
    low = options.pop("low", -2.0)
    plain = {k: v for k, v in options.items() if k in ("strides", "dilations", "p")}
    return call(
        f"{op_type}-{label}",
        **{"x": data(*x, low=low), "kernel_shape": list(kernel), "dtypes": F32, **options},
        oracle=lambda x: oracles.pool(kind, x, kernel, pads=pads, out=out, **plain),
    )


_TWO = {"strides": [2, 2]}
POOLS = [
    *(
        pool(op_type, label, kind, x, kernel, **options)
        for op_type, kind in (("MaxPool", "max"), ("AveragePool", "mean"), ("LpPool", "norm"))
        for label, x, kernel, options in (
            ("1d", (2, 2, 6), (3,), {"strides": [2]}),
            ("tiles", (2, 2, 4, 6), (2, 3), {"strides": [2, 3]}),
            ("overlap", (1, 2, 5, 4), (3, 2), {}),
            ("leftover", (1, 2, 7, 5), (2, 2), {"strides": [2, 2]}),
            ("pads", (1, 2, 5, 4), (3, 3), {"strides": [2, 2], "pads": [1, 0, 1, 2]}),
            ("gaps", (1, 1, 7, 5), (2, 1), {"strides": [3, 2]}),
            ("3d", (1, 2, 4, 2, 3), (2, 1, 2), {"strides": [2, 1, 1]}),
        )
    ),
    *(
        pool(op_type, label, kind, (1, 2, 7, 6), (2, 3), **options)
        for op_type, kind, since in (("MaxPool", "max", 13), ("AveragePool", "mean", 19))
        for label, options in (
            ("dilations", {"dilations": [3, 2], "since": since}),
            ("ceil", {"strides": [3, 2], "ceil_mode": 1, "out": [3, 3], "since": since}),
        )
    ),
    *(
        pool(op_type, f"{way}", kind, (1, 1, 5, 6), (2, 3), **options)
        for op_type, kind in (("MaxPool", "max"), ("AveragePool", "mean"))
        for way, options in (
            ("same-upper", {"auto_pad": "SAME_UPPER", **_TWO, "oracle_pads": [0, 0, 1, 1]}),
            ("same-lower", {"auto_pad": "SAME_LOWER", **_TWO, "oracle_pads": [1, 1, 0, 0]}),
            ("same", {"auto_pad": "SAME_UPPER", "oracle_pads": [0, 1, 1, 1]}),
            ("valid", {"auto_pad": "VALID", "strides": [2, 1]}),
        )
    ),
    pool(
        *("AveragePool", "counts-padding", "padded", (1, 2, 5, 4), (3, 2)),
        **{"strides": [2, 1], "pads": [1, 0, 1, 1], "count_include_pad": 1},
    ),
    pool(
        *("AveragePool", "counts-padding-ceil", "padded", (1, 1, 6, 6), (3, 3)),
        **{**_TWO, "pads": [1, 1, 0, 0], "count_include_pad": 1, "ceil_mode": 1},
        **{"out": [3, 3], "since": 19},
    ),
    *(
        pool("LpPool", f"p={p}", "norm", (1, 2, 4, 4), (2, 2), p=p, strides=[2, 2], low=low)
        for p, low in ((1, -2.0), (3, -2.0), (4, -2.0))
    ),
    pool("LpPool", "dilations", "norm", (1, 1, 5, 5), (2, 2), dilations=[2, 3], since=18, p=2),
    *(
        call(
            f"{op_type}-{len(shape)}d",
            oracle=lambda x, function=function: function(x, tuple(range(2, x.ndim))),
            **{"x": data(*shape), "dtypes": F32, "needs_rank": op_type == "GlobalMaxPool"},
            until=21 if op_type == "GlobalLpPool" else 99,
        )
        for op_type, function in (
            ("GlobalAveragePool", lambda x, axes: x.mean(axes, keepdims=True)),
            ("GlobalMaxPool", lambda x, axes: x.max(axes, keepdims=True)),
            ("GlobalLpPool", lambda x, axes: (x**2).sum(axes, keepdims=True) ** 0.5),
        )
        for shape in ((2, 3, 4), (2, 2, 3, 2))
    ),
    call(
        "GlobalLpPool-p=3",
        oracle=lambda x: (abs(x) ** 3).sum((2,), keepdims=True) ** (1 / 3),
        **{"x": data(2, 2, 4), "p": 3, "dtypes": F32, "until": 21},
    ),
    case(
        "MaxPool-two-outputs",
        lambda op, x: op("MaxPool", x, outputs=2, kernel_shape=[2, 2], strides=[2, 2])[0],
        x=data(1, 2, 4, 4),
    ),
    call(
        "MaxPool-column-major",
        oracle=lambda x: oracles.pool("max", x, (2, 2)),
        **{"x": data(1, 2, 4, 4), "kernel_shape": [2, 2], "storage_order": 1, "dtypes": F32},
    ),
    case(
        "MaxUnpool",
        lambda op, x: op.MaxUnpool(
            x, op.constant([[[[0, 7], [8, 15]]]]), kernel_shape=[2, 2], **_TWO
        ),
        oracle=lambda x: _unpooled(x, [0, 7, 8, 15]),
        **{"x": data(1, 1, 2, 2), "dtypes": F32},
    ),
]


def _unpooled(x: Any, places: Sequence[int]) -> Any:
    y = np.zeros(16)
    y[list(places)] = x.ravel()
    return y.reshape(1, 1, 4, 4)


CASES = [*CONV, *TRANSPOSED, *POOLS]
