"""One or several calls of every operator that has a gradient rule, with data where it is smooth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from ortflex_core import Array, Tensor
from tests.gradcheck import data


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


def unary(op_type: str, low: float = -2.0, high: float = 2.0, **options: Any) -> Case:
    label = "-".join([op_type, *(f"{k}={v}" for k, v in options.items() if k not in KNOWN)])
    return call(label, x=data(2, 3, low=low, high=high), **options)


_erf = np.vectorize(math.erf)


def _celu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(x / alpha))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


UNARY = [
    *map(unary, ("Identity", "Neg", "Abs", "Exp", "Sin", "Cos", "Atan", "Sinh", "Cosh")),
    *map(unary, ("Tanh", "Asinh", "Sigmoid", "Relu", "LeakyRelu", "Elu", "Selu")),
    *map(unary, ("Softplus", "Softsign", "HardSigmoid", "ThresholdedRelu", "Dropout")),
    *(unary(name, 0.5, 3.0) for name in ("Sqrt", "Log", "Reciprocal")),
    *(unary(name, -0.9, 0.9) for name in ("Asin", "Acos", "Atanh")),
    unary("Tan", -1.0, 1.0),
    unary("Acosh", 1.2, 3.0),
    unary("LeakyRelu", alpha=0.3),
    unary("Elu", alpha=1.7),
    unary("Selu", alpha=1.1, gamma=0.7),
    unary("Celu", oracle=lambda x: _celu(x, 1.0), dtypes=(np.float32,)),
    unary("Celu", alpha=0.6, oracle=lambda x: _celu(x, 0.6), dtypes=(np.float32,)),
    unary("HardSigmoid", -4.0, 4.0, alpha=0.3, beta=0.4),
    unary("ThresholdedRelu", alpha=0.25),
    unary("HardSwish", -4.0, 4.0, since=14),
    unary("Mish", since=18),
    unary("Erf", oracle=lambda x: _erf(x), dtypes=(np.float32,)),
    unary("Gelu", since=20, oracle=lambda x: _gelu(x), dtypes=(np.float32,)),
    unary("Gelu", approximate="tanh", since=20),
]

_x, _row, _column = data(2, 3), data(3, seed=1), data(2, 1, seed=2)
_positive = data(2, 3, low=0.5, high=2)

BINARY = [
    *(
        call(f"{name}-{label}", x=_x, y=y)
        for name in ("Add", "Sub", "Mul", "Max", "Min")
        for label, y in (
            *(("row", _row), ("column", _column)),
            *(("scalar", data(seed=3)), ("deep", data(2, 1, 1, seed=4))),
        )
    ),
    case("Div", lambda op, x, y: x / y, x=_x, y=data(2, 1, low=0.5, high=2)),
    case("Div-self", lambda op, x: op.Div(x, x) * x, x=_positive),
    case("Mul-self", lambda op, x: x * x, x=_x),
    case("Add-self", lambda op, x: x + x, x=_x),
    case("Sub-self", lambda op, x: op.Sub(x, x) * x + x, x=_x),
    *(
        case(f"Pow-{e}", lambda op, x, e=e: x**e, x=_positive)
        for e in (0, 0.5, 1, 1.3, 2, 3, 4, -1, -2.5)
    ),
    case("Pow-negative-base", lambda op, x: x**3, x=_x),
    case("Pow-negative-base-5", lambda op, x: op.Pow(x, op.constant([[5]])), x=_x),
    case("Pow-both", lambda op, x, e: op.Pow(x, e), x=_positive, e=data(3, seed=5)),
    case("Pow-integer", lambda op, x, e: op.Pow(x, e), x=_x, e=np.array([0, 1, 4])),
    call("Mod", x=3 * _x, y=data(3, low=0.6, high=1.4), fmod=1),
    *(call(name, x=_x, y=_row, z=_column) for name in ("Sum", "Mean", "Max-three", "Min-three")),
    call("Max-one", x=_x),
    case("Clip", lambda op, x: op.Clip(x, -0.7, 0.9), x=_x),
    case("Clip-low", lambda op, x, low: op.Clip(x, low), x=_x, low=np.array(0.1)),
    case("Clip-high", lambda op, x, high: op.Clip(x, max=high), x=_x, high=np.array(0.1)),
    call("Clip-both", x=_x, low=np.array(-0.7), high=np.array(0.9)),
    call("Where", c=np.array([[True], [False]]), x=_row, y=data(2, 3, seed=6)),
    case("Where-scalars", lambda op, c, x: op.Where(c, x, 2.0), c=_x > 0, x=data(seed=3)),
    call("PRelu", x=_x, s=_row, since=16),
    case(
        "CastLike",
        lambda op, x: op.CastLike(op.CastLike(x, op.constant(1.0, 11)) ** 3, x),
        **{"x": _x, "since": 15},
    ),
    case("Cast", lambda op, x: op.Cast(op.Cast(x, to=11) ** 3, to=x.dtype), x=_x),
]

REDUCTIONS = [
    call(
        f"{name}-{label}",
        x=data(2, 3, 4, low=low, high=2),
        reference=name in ("ReduceL1", "ReduceL2", "ReduceLogSum"),
        **options,
    )
    for name, low in (
        *((n, -2.0) for n in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")),
        *((n, -2.0) for n in ("ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare")),
        ("ReduceLogSum", 0.5),
    )
    for label, options in (
        ("all", {"keepdims": 0}),
        ("all-kept", {}),
        ("last", {"axes": [-1], "keepdims": 0}),
        ("outer", {"axes": [2, 0], "keepdims": 0}),
        ("middle-kept", {"axes": [1]}),
    )
]
REDUCTIONS += [
    case(
        "ReduceSum-noop",
        lambda op, x: op.ReduceSum(x, op.constant([], 7), noop_with_empty_axes=1, keepdims=0),
        x=_x,
    ),
    *(
        case(
            f"{name}-noop",
            lambda op, x, name=name: op(name, x, noop_with_empty_axes=1, keepdims=0) * 2,
            **{"x": _x, "oracle": oracle, "since": 18},
        )
        for name, oracle in (
            ("ReduceMean", lambda x: 2 * x),
            ("ReduceMax", lambda x: 2 * x),
            ("ReduceL2", lambda x: 2 * abs(x)),
            ("ReduceSumSquare", lambda x: 2 * x**2),
        )
    ),
    call("ReduceSum-axes-at-run-time", x=data(2, 3, 4), axes=np.array([1]), keepdims=0),
    case(
        "ReduceMean-axes-at-run-time",
        lambda op, x, axes: op.ReduceMean(x, axes, keepdims=0) * 2,
        **{"x": data(2, 3, 4), "axes": np.array([0, 2]), "since": 18},
    ),
    case("ReduceProd-zero", lambda op, x: op.ReduceProd(x), x=np.array([2.0, 0.0, 3.0])),
    case("ReduceProd-zeros", lambda op, x: op.ReduceProd(x), x=np.array([0.0, 0.0, 3.0])),
    *(
        call(f"{name}-{axis}", x=data(2, 3, 4), axis=axis)
        for name in ("Softmax", "LogSoftmax")
        for axis in (-1, 1)
    ),
    *(
        case(
            f"CumSum-{exclusive}{reverse}",
            lambda op, x, e=exclusive, r=reverse: op.CumSum(x, 1, exclusive=e, reverse=r),
            x=_x,
        )
        for exclusive in (0, 1)
        for reverse in (0, 1)
    ),
]

_cube, _sizes = data(2, 3, 4), np.array([4, 1, 3])

SHAPES = [
    case("Reshape", lambda op, x: op.Reshape(x, [4, -1]), x=_cube),
    case("Reshape-copy", lambda op, x: op.Reshape(x, [0, -1]), x=_cube),
    case("Flatten", lambda op, x: op.Flatten(x, axis=2), x=_cube),
    case("Transpose", lambda op, x: op.Transpose(x, perm=[1, 2, 0]), x=_cube),
    case("Transpose-default", lambda op, x: op.Transpose(x), x=_cube),
    case("Squeeze", lambda op, x: op.Squeeze(x, axes=[1]), x=_column),
    case("Squeeze-all", lambda op, x: op.Squeeze(x), x=_column),
    case("Unsqueeze", lambda op, x: op.Unsqueeze(x, axes=[0, -1]), x=_x),
    case("Expand", lambda op, x: op.Expand(x, [4, 2, 3]), x=_column),
    case("Expand-at-run-time", lambda op, x, s: op.Expand(x, s) * 2, x=_column, s=_sizes),
    case("Concat", lambda op, x, y: op.Concat(x, y, x, axis=-1), x=_x, y=_column),
    case("Concat-one", lambda op, x: op.Concat(x, op.Abs(op.Floor(x)), axis=0), x=_x),
    case("Concat-single", lambda op, x: op.Concat(x, axis=0), x=_x),
    case("Split", lambda op, x: _weighted(op("Split", x, [1, 2, 1], axis=2, outputs=3)), x=_cube),
    case("Split-unused", lambda op, x: op("Split", x, [1, 2], axis=1, outputs=2)[1], x=_x),
    *(
        case(f"Slice-{label}", lambda op, x, args=args: op.Slice(x, *args), x=data(4, 5))
        for label, args in (
            ("plain", ([1], [3])),
            ("last", ([-2], [2**40], [1])),
            ("back", ([3], [-(2**40)], [1], [-1])),
            ("both", ([2, -1], [0, 0], [0, -1], [-1, -1])),
            ("steps", ([0, 4], [4, 0], [0, 1], [2, -3])),
            ("nothing", ([0], [4], [0], [1])),
        )
    ),
    case(
        "Slice-at-run-time",
        lambda op, x, a, b: op.Slice(x, a, b) * 2,
        **{"x": data(4, 5), "a": np.array([1, 0]), "b": np.array([3, 4])},
    ),
    case("Pad", lambda op, x: op.Pad(x, [1, 0, 0, 2]), x=_x),
    case("Pad-value", lambda op, x, v: op.Pad(x, [0, 1, 1, 2], v), x=_x, v=np.array(0.5)),
    case("Pad-axes", lambda op, x: op("Pad", x, [2, 1], None, [1]), x=_x, since=18),
    case("Pad-at-run-time", lambda op, x, p: op.Pad(x, p) * 2, x=_x, p=np.array([1, 0, 0, 2])),
    *(
        case(f"Pad-{mode}", lambda op, x, m=mode: op.Pad(x, [1, 2, 0, 1], mode=m), x=data(3, 4))
        for mode in ("edge", "reflect")
    ),
    case("Tile", lambda op, x: op.Tile(x, [2, 3]), x=_x),
    case("Trilu", lambda op, x: op.Trilu(x, upper=0), x=data(3, 3), since=14),
]


def _weighted(parts: Any) -> Any:
    return parts[0] * 3 + parts[2] * parts[2]


MATRICES = [
    *(
        call(
            f"MatMul-{'x'.join(map(str, a))}-{'x'.join(map(str, b))}",
            **{"x": data(*a), "y": data(*b, seed=1), "needs_rank": True},
        )
        for a, b in (
            ((2, 3), (3, 4)),
            ((3,), (3,)),
            ((3,), (3, 4)),
            ((2, 3), (3,)),
            ((5, 2, 3), (3, 4)),
            ((5, 2, 3), (5, 3, 4)),
            ((2, 3), (5, 3, 4)),
            ((5, 1, 2, 3), (2, 3, 4)),
            ((3,), (5, 3, 4)),
            ((5, 2, 3), (3,)),
        )
    ),
    *(
        call(
            f"Gemm-{ta}{tb}-{len(c)}",
            a=data(*((3, 2) if ta else (2, 3))),
            b=data(*((4, 3) if tb else (3, 4)), seed=1),
            c=data(*c, seed=2),
            **{"alpha": 0.7, "beta": 1.3, "transA": ta, "transB": tb},
        )
        for ta in (0, 1)
        for tb in (0, 1)
        for c in ((), (4,), (2, 1), (2, 4))
    ),
    call("Gemm", a=_x, b=data(3, 4)),
]

_table, _rows = data(4, 3), np.array([[2, 0], [-1, 2]])
_cells, _pair = np.array([[0, 2, 0], [1, 0, -1]]), np.array([0.2, 1.7])

INDEXING = [
    *(
        call(f"Gather-{axis}-rank{index.ndim}", x=data(3, 3, 4), i=index, axis=axis)
        for axis in (0, 1, -1)
        for index in (_rows, np.array(1), np.array([2, 2, -3]))
    ),
    *(call(f"GatherElements-{axis}", x=data(3, 3), i=_cells, axis=axis) for axis in (0, 1)),
    call("GatherND", x=_table, i=np.array([[1, 2], [0, 0], [1, 2]])),
    call("GatherND-rows", x=_table, i=np.array([[3], [3]])),
    call("GatherND-batch", x=data(2, 3, 2), i=np.array([[1], [2]]), batch_dims=1),
    call(
        "ScatterElements",
        **{"x": data(2, 4), "i": np.array([[0, 3], [2, 1]]), "u": data(2, 2, seed=1), "axis": 1},
    ),
    call("ScatterND", x=_table, i=np.array([[2], [0]]), u=data(2, 3, seed=1)),
    call(
        "ScatterElements-add",
        **{"x": _table, "i": np.array([[1, 1, 0], [1, 2, 0]]), "u": _x},
        **{"axis": 0, "reduction": "add", "since": 16},
    ),
    call(
        "ScatterND-add",
        **{"x": _table, "i": np.array([[2], [2]]), "u": data(2, 3, seed=1)},
        **{"reduction": "add", "since": 16},
    ),
    case("OneHot", lambda op, i, v: op.OneHot(i, 3, v), i=np.array([0, 2, 2, 1]), v=_pair),
    case(
        "Range",
        lambda op, a, d: op.Range(a, a + 3.5 * d, d),
        **{"a": np.array(0.5), "d": np.array(0.25)},
    ),
    case("TopK", lambda op, x: op("TopK", x, [2], axis=0, outputs=2)[0], x=_table),
]

CASES = [*UNARY, *BINARY, *REDUCTIONS, *SHAPES, *MATRICES, *INDEXING]
