"""Cases of Einsum, scattering with a reduction, the standard's losses, quantization and the rest."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_core import Array
from tests.gradcheck import data
from tests.plugins.gradient_cases import Case, call, case
from tests.tracing import NEWEST

F32 = (np.float32,)


def einsum(equation: str, *shapes: tuple[int, ...]) -> Case:
    arrays = {f"x{k}": data(*s, seed=k) for k, s in enumerate(shapes)}
    label = "_".join("x".join(map(str, s)) for s in shapes)
    return case(
        f"Einsum-{equation}-{label}",
        lambda op, **xs: op.Einsum(*xs.values(), equation=equation),
        needs_rank=True,
        **arrays,
    )


EINSUM = [
    einsum("ij,jk->ik", (2, 3), (3, 4)),
    einsum("ij->ji", (2, 3)),
    einsum("ij->i", (2, 3)),
    einsum("ij->", (2, 3)),
    einsum("i,j", (2,), (3,)),
    einsum("ij,ij->j", (2, 3), (2, 3)),
    einsum("bij, bjk -> bik", (2, 3, 2), (2, 2, 3)),
    einsum("...ij,...jk->...ik", (2, 2, 3), (1, 3, 2)),
    einsum("...ij,jk", (2, 2, 3), (3, 2)),
    einsum("b...,...->b...", (2, 2, 3), (2, 1)),
    einsum("ii->i", (3, 3)),
    einsum("ii", (3, 3)),
    einsum("iji,j->i", (2, 3, 2), (3,)),
    einsum("ij,kl->i", (2, 3), (2, 2)),
    einsum("bi,ij,bj->b", (2, 3), (3, 2), (2, 2)),
    einsum("bhd,bkd->bhk", (2, 1, 3), (2, 3, 3)),
]

_grid, _table = data(2, 3, seed=1), data(4, 3)
_twice = np.array([[1, 1, 0], [1, 2, 0]])
_zeros = np.where(np.arange(6).reshape(2, 3) % 3 == 0, 0.0, _grid)

SCATTER = [
    call(
        f"ScatterElements-{reduction}{label}",
        **{"x": _table, "i": _twice, "u": updates},
        **{"axis": 0, "reduction": reduction, "since": since},
    )
    for reduction, since in (("mul", 16), ("max", 18), ("min", 18))
    for label, updates in (("", _grid), *((("-zeros", _zeros),) if reduction == "mul" else ()))
] + [
    call(
        f"ScatterND-{reduction}",
        **{"x": _table, "i": np.array([[2], [2], [0]]), "u": data(3, 3, seed=1)},
        **{"reduction": reduction, "since": since},
    )
    for reduction, since in (("mul", 16), ("max", 18), ("min", 18))
]


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _picked(scores: Array, labels: Array, weight: Any, ignored: int | None, how: str) -> Array:
    keep = np.ones(labels.shape, bool) if ignored is None else labels != ignored
    labels = np.where(keep, labels, 0)
    w = (np.ones(scores.shape[1]) if weight is None else weight)[labels] * keep
    rows = -w * np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    if how == "none":
        return rows
    return np.asarray(rows.sum() / (w.sum() if how == "mean" else 1))


def likelihood(op_type: str, how: str, deep: bool, weighted: bool, ignored: int | None) -> Case:
    shape = (3, 4, 2) if deep else (3, 4)
    labels = np.random.default_rng(3).integers(0, 4, (3, *shape[2:]))
    labels.flat[0] = 1 if ignored is None else ignored
    arrays: dict[str, Array] = {"x": data(*shape), "t": labels}
    if weighted:
        arrays["w"] = data(4, low=0.5, high=2, seed=4)
    settings: dict[str, Any] = {"reduction": how}
    if ignored is not None:
        settings["ignore_index"] = ignored

    def oracle(x: Array, t: Array, w: Array | None = None) -> Array:
        scores = x if op_type.startswith("Neg") else _log_softmax(x)
        return _picked(scores, t, w, ignored, how)

    label = "-".join([op_type, how, *(["deep"] * deep), *(["weighted"] * weighted), str(ignored)])
    return call(label, **arrays, **settings, oracle=oracle, needs_rank=True, dtypes=F32)


LOSSES = [
    likelihood(op_type, how, deep, weighted, ignored)
    for op_type in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
    for how, deep, weighted, ignored in (
        ("mean", False, False, None),
        ("mean", True, True, 2),
        ("sum", False, True, None),
        ("sum", False, False, -1),
        ("none", True, True, -1),
        ("none", False, False, None),
    )
] + [
    case(
        "SoftmaxCrossEntropyLoss-log",
        lambda op, x, t: op("SoftmaxCrossEntropyLoss", x, t, outputs=2)[1] * 3,
        **{"x": data(3, 4), "t": np.array([1, 0, 3]), "needs_rank": True, "dtypes": F32},
        oracle=lambda x, t: 3 * _log_softmax(x),
    )
]


def _there_and_back(op: Any, x: Any, scale: Any, zero: Any, **axis: int) -> Any:
    return op.DequantizeLinear(op.QuantizeLinear(x, scale, zero, **axis), scale, zero, **axis)


_scales = np.array([0.25, 0.01, 0.5], np.float32)

_ROUNDED: dict[str, Any] = {"needs_rank": True, "dtypes": F32}
QUANTIZATION = [
    # Straight through: what the pair stands for is clipping to the range of the type.
    case(
        "QuantizeLinear-tensor",
        lambda op, x: _there_and_back(op, x, np.float32(0.01), np.int8(5)),
        **{"x": _table, "oracle": lambda x: np.clip(x, -1.33, 1.22), **_ROUNDED},
    ),
    case(
        "QuantizeLinear-axis",
        lambda op, x: _there_and_back(op, x, _scales, np.zeros(3, np.uint8), axis=1),
        **{"x": _table, "oracle": lambda x: np.clip(x, 0, 255 * _scales.astype(float)), **_ROUNDED},
    ),
    call(
        "DequantizeLinear-scales",
        **{"q": np.array([[3, -2, 7], [1, 5, -9]], np.int8), "s": data(3, low=0.1, high=1)},
        **{"axis": 1, "oracle": lambda q, s: q * s, **_ROUNDED},
    ),
    call(
        "DequantizeLinear-vector",
        **{"q": np.array([3, -2], np.int8), "s": data(2, low=0.1, high=1)},
        **{"axis": 0, "oracle": lambda q, s: q * s, **_ROUNDED},
    ),
    case(
        "DynamicQuantizeLinear",
        lambda op, x: op.DequantizeLinear(*op("DynamicQuantizeLinear", x, outputs=3)),
        **{"x": _table, "oracle": lambda x: x * 1.0, **_ROUNDED},
    ),
]

_lengths = np.array([3, 1])
_with_zeros = np.array([[0.7, 0.0, 1.3, -0.4], [2.0, 0.0, 0.0, 1.5]])

REST = [
    call("Shrink", x=_table, bias=0.3, lambd=0.6, reference=True),
    call(
        "Swish",
        oracle=lambda x: x / (1 + np.exp(-1.7 * x)),
        **{"x": _table, "alpha": 1.7, "since": 24, "dtypes": F32},
    ),
    call("Compress", x=_grid, c=np.array([1, 0, 1, 1], bool)),
    call("Compress-axis", x=_grid, c=np.array([True, False, True]), axis=1),
    case("Unique", lambda op, x: op("Unique", x, sorted=1) * 2, x=_grid),
    call("Unique-axis", x=_grid, axis=1, sorted=0),
    *(
        call(
            f"ReverseSequence-{time}",
            **{"x": data(*((3, 2, 2) if time == 0 else (2, 3, 2))), "n": _lengths},
            **{"time_axis": time, "batch_axis": 1 - time},
        )
        for time in (0, 1)
    ),
    *(
        call(
            f"Det-{'x'.join(map(str, shape))}",
            **{"x": data(*shape), "oracle": lambda x: np.linalg.det(x), "dtypes": F32},
        )
        for shape in ((1, 1), (2, 2), (3, 3), (2, 3, 3))
    ),
    *(
        case(
            f"DFT-{label}",
            lambda op, x, a=axis, o=options: op.DFT(x, axis=a, **o),
            x=data(*shape),
            since=17,
        )
        for label, shape, axis, options in (
            ("complex", (2, 5, 2), 1, {}),
            ("inverse", (2, 4, 2), 1, {"inverse": 1}),
            ("real", (2, 5, 1), 1, {}),
            ("onesided", (2, 6, 1), 1, {"onesided": 1}),
            ("onesided-odd", (1, 5, 1), 1, {"onesided": 1}),
            ("padded", (2, 4, 1), 1, {"dft_length": 6}),
            ("cut", (2, 5, 2), 1, {"dft_length": 3}),
        )
    ),
    case(
        "STFT",
        lambda op, x, w: op.STFT(x, 2, w, 4),
        **{"x": data(2, 9, 1), "w": data(4, low=0.3, high=1), "since": 17, "needs_rank": True},
    ),
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
            ("complex", (2, 5, 2), 1, None, {}),
            ("front", (4, 2, 2), 0, None, {"inverse": 1}),
            ("counted-back", (2, 5, 1), -2, None, {}),
            ("onesided", (2, 6, 1), 1, None, {"onesided": 1}),
            ("onesided-longer", (2, 4, 1), 1, 7, {"onesided": 1}),
            ("cut", (2, 5, 2), 1, 3, {"inverse": 1}),
            *(
                (f"real-{n}", (2, n // 2 + 1, 2), 1, n, {"inverse": 1, "onesided": 1})
                for n in (6, 7)
                if NEWEST >= 26  # older runtimes refuse to make a real signal of half a spectrum
            ),
        )
    ),
    *(
        call(
            f"TensorScatter-{mode}",
            **{"x": data(2, 4, 3), "u": data(2, 2, 3, seed=1), "i": np.array([1, last])},
            **{"axis": 1, "mode": mode, "since": 24, "needs_rank": True},
        )
        for mode, last in (("linear", 2), ("circular", 3))
    ),
    *(
        case(
            f"CumProd-{exclusive}{reverse}-{label}",
            lambda op, x, e=exclusive, r=reverse: op.CumProd(x, 1, exclusive=e, reverse=r),
            x=x,
            since=26,
        )
        for exclusive in (0, 1)
        for reverse in (0, 1)
        for label, x in (("plain", _grid), ("zeros", _with_zeros))
    ),
]

CASES = [*EINSUM, *SCATTER, *LOSSES, *QUANTIZATION, *REST]
