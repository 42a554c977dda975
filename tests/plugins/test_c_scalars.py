"""Elementwise operators and functions in C, compared with longer types and with other compilers."""

from __future__ import annotations

import ctypes
import functools
import math
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from ortflex_core import numpy_dtype
from ortflex_plugins.c import compiler
from ortflex_plugins.c.functions import definitions
from ortflex_plugins.c.scalars import HEADERS, TYPES, expression, literal, operators

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle())),
]

F32, F64, I64, BOOL = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL
U64 = TensorProto.UINT64
Reference = Callable[..., Any]


def loop(name: str, types: list[str], to: str, text: str) -> str:
    """A function that computes an expression of a[i], b[i], c[i] for every i."""
    given = ", ".join(f"const {t} *{letter}" for t, letter in zip(types, "abc", strict=False))
    export = '__attribute__((visibility("default")))'
    return (
        f"{export} void {name}({given}, {to} *y, int64_t n) "
        f"{{ for (int64_t i = 0; i < n; i++) y[i] = {text}; }}\n"
    )


def call(library: ctypes.CDLL, name: str, dtype: Any, *arrays: Any) -> Any:
    result = np.empty(arrays[0].shape, dtype)
    places = [ctypes.c_void_p(a.ctypes.data) for a in (*arrays, result)]
    getattr(library, name)(*places, ctypes.c_int64(result.size))
    return result


# Functions of one number.

_erf = np.vectorize(math.erf, otypes=[np.float64])
EXACT: Mapping[str, tuple[float, Reference]] = {
    "f32_exp": (2, np.exp),
    "f32_log": (2, np.log),
    "f32_log1p": (2, np.log1p),
    "f32_expm1": (4, np.expm1),
    "f32_tanh": (2, np.tanh),
    "f32_erf": (2, _erf),
    "f32_sigmoid": (3, lambda x: 1 / (1 + np.exp(-x))),
    "f32_softplus": (2, lambda x: np.logaddexp(x, 0)),
    "f32_sin": (2, np.sin),
    "f32_cos": (2, np.cos),
    "f64_exp": (2, np.exp),
    "f64_log": (2, np.log),
    "f64_tanh": (2, np.tanh),
    "f64_sigmoid": (3, lambda x: 1 / (1 + np.exp(-x))),
    "f64_sin": (3, np.sin),
    "f64_cos": (3, np.cos),
}
"""The largest error in units in the last place, and the reference."""
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-38, 1.0, -1.0, 88.8, -103.9]


def functions_source() -> str:
    kinds = {"f32": "float", "f64": "double"}
    loops = [loop(f"map_{n}", [kinds[n[:3]]], kinds[n[:3]], f"{n}(a[i])") for n in EXACT]
    loops.append(loop("map_f32_pow", ["float"] * 2, "float", "f32_pow(a[i], b[i])"))
    return HEADERS + definitions([*EXACT, "f32_pow"]) + "".join(loops)


@functools.cache
def functions() -> ctypes.CDLL:
    return compiler.load_library(functions_source())


@functools.cache
def points(name: str) -> Any:
    """Numbers everywhere, more of them where a function is not flat, and the special ones."""
    rng = np.random.default_rng(0)
    if name.startswith("f32"):
        words = np.arange(0, 2**32, 2**15 - 19, dtype=np.uint64).astype(np.uint32).view(np.float32)
    else:
        words = rng.integers(0, 2**64, 2**17, dtype=np.uint64).view(np.float64)
    near = [np.linspace(-750, 720, 2**16), np.linspace(-110, 110, 2**17), np.linspace(-3, 3, 2**17)]
    out = np.concatenate([words, *(n.astype(words.dtype) for n in near)])
    if name.endswith(("sin", "cos")):
        out = out[np.abs(out) < 1e5]
    return np.concatenate([out, np.array(SPECIAL, out.dtype)])


def errors(found: Any, exact: Any) -> Any:
    """The errors in units in the last place of the result's type."""
    rounded = exact.astype(found.dtype)
    same = (found == rounded) | (np.isnan(found) & np.isnan(rounded))
    size = np.spacing(np.abs(rounded)).astype(exact.dtype)
    return np.where(same, 0, np.abs(found.astype(exact.dtype) - exact) / size)


@pytest.mark.parametrize("name", EXACT)
@np.errstate(all="ignore")
def test_a_function_is_near_the_exact_result(name: str) -> None:
    most, reference = EXACT[name]
    x = points(name)
    wide = np.float64 if x.dtype == np.float32 else np.longdouble
    if wide == np.longdouble and np.finfo(np.longdouble).nmant <= 52:
        pytest.skip("numpy has no type that is longer than float64 here")
    found = errors(call(functions(), f"map_{name}", x.dtype, x), reference(x.astype(wide)))
    worst = np.nanargmax(np.where(np.isnan(found), np.inf, found))
    assert found[worst] <= most, x[worst]
    assert not np.isnan(found).any()


@np.errstate(all="ignore")
def test_a_power_is_near_the_exact_result() -> None:
    rng = np.random.default_rng(0)
    edges = np.array(
        [*SPECIAL, 0.5, -0.5, 2, -2, 3, -3, 1.5, 3e38, -3e38, 2**24, 8388609], np.float32
    )
    grid = np.meshgrid(edges, edges)
    x = np.concatenate(
        [np.exp(3 * rng.normal(size=2**16)), 3 * rng.normal(size=2**12), grid[0].ravel()]
    )
    y = np.concatenate([9 * rng.normal(size=2**16), rng.integers(-9, 9, 2**12), grid[1].ravel()])
    x, y = x.astype(np.float32), y.astype(np.float32)
    found, exact = call(functions(), "map_f32_pow", np.float32, x, y), np.power(x.astype(float), y)
    assert np.max(errors(found, exact)) <= 2
    same_sign = np.signbit(found) == np.signbit(exact)
    assert (same_sign | np.isnan(exact)).all()


def others() -> list[tuple[str, tuple[str, ...]]]:
    """Other compilers and options than those of this system's default."""
    found = [
        ("cc", ("-O0",)),
        ("cc", ("-O2",)),
        ("gcc", ("-O3",)),
        ("clang", ("-O0",)),
        ("clang", ()),
    ]
    found += [("clang-14", ("-O3",)), ("cc", ("-O3", "-march=x86-64")), ("clang-14", ("-O1",))]
    if compiler.obstacle() is None and "-march=native" not in compiler.find_compiler().target:
        found = [f for f in found if "-march=x86-64" not in f[1]]
    return [f for f in found if shutil.which(f[0])]


@pytest.mark.parametrize("other", others(), ids=str)
def test_functions_have_the_same_bits_with_every_compiler(
    other: tuple[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = functions()
    monkeypatch.setenv("CC", other[0])
    another = compiler.load_library(functions_source(), other[1])
    for name in EXACT:
        x = points(name)
        words = np.uint32 if x.dtype == np.float32 else np.uint64
        results = [call(lib, f"map_{name}", x.dtype, x) for lib in (library, another)]
        nan = np.isnan(results[0]) & np.isnan(results[1])  # their signs differ
        assert (nan | (results[0].view(words) == results[1].view(words))).all(), name


# Operators.

_sigmoid = EXACT["f32_sigmoid"][1]
_softplus = EXACT["f32_softplus"][1]


def _divided(a: Any, b: Any) -> Any:
    """Towards zero."""
    down = a // b
    return down + ((down * b != a) & ((a < 0) != (b < 0)))


def _or_zero(function: Reference) -> Reference:
    """What divides by zero is 0."""
    return lambda a, b: np.where(b == 0, 0, function(a, np.where(b == 0, 1, b)))


def _shifted(left: bool) -> Reference:
    def reference(a: Any, b: Any) -> Any:
        inside = np.minimum(b, np.uint64(63))
        return np.where(b > 63, 0, a << inside if left else a >> inside)

    return reference


def _cast(x: Any) -> Any:
    inside = (x >= -(2.0**63)) & (x < 2.0**63)
    return np.where(inside, np.where(inside, x, 0).astype(np.int64), np.iinfo(np.int64).min)


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1 + _erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _selu(x: Any) -> Any:
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x))


ANY, FLOATS = (F32, F64, I64), (F32, F64)
Case = tuple[str, int, int, int | None, dict[str, Any], Reference]
CASES: list[tuple[str, tuple[int, ...], int, int | None, dict[str, Any], Reference]] = [
    ("Add", ANY, 2, None, {}, np.add),
    ("Sub", ANY, 2, None, {}, np.subtract),
    ("Mul", ANY, 2, None, {}, np.multiply),
    ("Max", ANY, 2, None, {}, np.maximum),
    ("Min", ANY, 2, None, {}, np.minimum),
    ("Neg", ANY, 1, None, {}, np.negative),
    ("Abs", ANY, 1, None, {}, np.abs),
    ("Sign", ANY, 1, None, {}, np.sign),
    ("Identity", ANY, 1, None, {}, lambda x: x),
    ("Equal", ANY, 2, BOOL, {}, np.equal),
    ("Less", ANY, 2, BOOL, {}, np.less),
    ("LessOrEqual", ANY, 2, BOOL, {}, np.less_equal),
    ("Greater", ANY, 2, BOOL, {}, np.greater),
    ("GreaterOrEqual", ANY, 2, BOOL, {}, np.greater_equal),
    ("Relu", ANY, 1, None, {}, lambda x: np.where(x < 0, 0, x)),
    ("Clip", ANY, 3, None, {}, lambda x, low, high: np.minimum(np.maximum(x, low), high)),
    ("PRelu", FLOATS, 2, None, {}, lambda x, slope: np.where(x < 0, slope * x, x)),
    ("Div", FLOATS, 2, None, {}, np.divide),
    ("Div", (I64,), 2, None, {}, _or_zero(_divided)),
    ("Div", (U64,), 2, None, {}, _or_zero(np.floor_divide)),
    ("Mod", (I64,), 2, None, {}, _or_zero(np.mod)),
    ("Mod", (I64,), 2, None, {"fmod": 1}, _or_zero(np.fmod)),
    ("Mod", FLOATS, 2, None, {"fmod": 1}, np.fmod),
    ("Sqrt", FLOATS, 1, None, {}, np.sqrt),
    ("Reciprocal", FLOATS, 1, None, {}, lambda x: 1 / x),
    ("Floor", FLOATS, 1, None, {}, np.floor),
    ("Ceil", FLOATS, 1, None, {}, np.ceil),
    ("Round", FLOATS, 1, None, {}, np.rint),
    ("Sum", FLOATS, 2, None, {}, np.add),
    ("Mean", FLOATS, 2, None, {}, lambda a, b: (a + b) / 2),
    ("Exp", FLOATS, 1, None, {}, np.exp),
    ("Log", FLOATS, 1, None, {}, np.log),
    ("Tanh", FLOATS, 1, None, {}, np.tanh),
    ("Sigmoid", FLOATS, 1, None, {}, _sigmoid),
    ("Sin", FLOATS, 1, None, {}, np.sin),
    ("Cos", FLOATS, 1, None, {}, np.cos),
    ("Softsign", FLOATS, 1, None, {}, lambda x: x / (1 + np.abs(x))),
    ("HardSigmoid", FLOATS, 1, None, {}, lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    ("HardSwish", FLOATS, 1, None, {}, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    ("Swish", FLOATS, 1, None, {"alpha": 1.5}, lambda x: x * _sigmoid(1.5 * x)),
    ("LeakyRelu", FLOATS, 1, None, {"alpha": 0.25}, lambda x: np.where(x < 0, 0.25 * x, x)),
    ("ThresholdedRelu", FLOATS, 1, None, {}, lambda x: np.where(x > 1, x, 0)),
    ("Erf", (F32,), 1, None, {}, _erf),
    ("Softplus", (F32,), 1, None, {}, _softplus),
    ("Elu", (F32,), 1, None, {"alpha": 0.5}, lambda x: np.where(x > 0, x, 0.5 * np.expm1(x))),
    ("Selu", (F32,), 1, None, {}, _selu),
    ("Celu", (F32,), 1, None, {"alpha": 2.0}, lambda x: np.where(x > 0, x, 2 * np.expm1(x / 2))),
    ("Mish", (F32,), 1, None, {}, lambda x: x * np.tanh(_softplus(x))),
    ("Gelu", (F32,), 1, None, {}, _gelu),
    ("Gelu", (F32,), 1, None, {"approximate": "tanh"}, _gelu_tanh),
    ("Pow", (F32,), 2, None, {}, np.power),
    ("IsNaN", FLOATS, 1, BOOL, {}, np.isnan),
    ("IsInf", FLOATS, 1, BOOL, {}, np.isinf),
    ("IsInf", FLOATS, 1, BOOL, {"detect_positive": 0}, np.isneginf),
    ("Cast", FLOATS, 1, I64, {}, _cast),
    ("Cast", FLOATS, 1, BOOL, {}, lambda x: x != 0),
    ("Cast", ANY, 1, F64, {}, lambda x: x),
    ("Cast", ANY, 1, F32, {}, lambda x: x),
    ("Cast", (I64,), 1, U64, {}, lambda x: x.astype(np.uint64)),
    ("And", (BOOL,), 2, None, {}, np.logical_and),
    ("Or", (BOOL,), 2, None, {}, np.logical_or),
    ("Xor", (BOOL,), 2, None, {}, np.logical_xor),
    ("Not", (BOOL,), 1, None, {}, np.logical_not),
    ("BitwiseAnd", (I64,), 2, None, {}, np.bitwise_and),
    ("BitwiseOr", (I64,), 2, None, {}, np.bitwise_or),
    ("BitwiseXor", (I64,), 2, None, {}, np.bitwise_xor),
    ("BitwiseNot", (I64,), 1, None, {}, np.invert),
    ("BitShift", (U64,), 2, None, {"direction": "LEFT"}, _shifted(True)),
    ("BitShift", (U64,), 2, None, {"direction": "RIGHT"}, _shifted(False)),
    ("Where", ANY, 3, None, {}, np.where),
]
EACH: list[Case] = [(op, t, n, to, given, f) for op, types, n, to, given, f in CASES for t in types]


def numbers(dtype: int, seed: int) -> Any:
    """Numbers of a type in an order of their own, with all pairs of the special ones."""
    kind, rng = numpy_dtype(dtype), np.random.default_rng(seed)
    if kind.kind == "f":
        special = np.array([*SPECIAL, 0.5, 1.5, -2.5, 3e38, 2.0**63, -(2.0**63)], kind)
        spread = (5 * rng.standard_normal(4096)).astype(kind)
    elif kind.kind == "b":
        return rng.integers(0, 2, 4096).astype(kind)
    else:
        bounds = np.iinfo(kind)
        special = np.array([0, 1, 2, 63, 64, 65, bounds.max, bounds.min, bounds.max - 1], kind)
        special = np.concatenate([special, -special[1:3]])
        spread = rng.integers(
            bounds.min // 2 ** (8 * seed), bounds.max // 2 ** (8 * seed), 4096, kind
        )
    pairs = np.meshgrid(special, special)[seed % 2].ravel()
    return np.concatenate([spread, pairs])


def case_source() -> str:
    used: set[str] = set()
    loops = []
    for k, (op, dtype, count, to, attributes, _) in enumerate(EACH):
        result = dtype if to is None else to
        types = [TYPES[dtype]] * count
        if op == "Where":
            types[0] = TYPES[BOOL]
        arguments = [f"{letter}[i]" for letter in "abc"[:count]]
        found = expression(op, dtype, arguments, attributes, result)
        assert found is not None, op
        used |= found.calls
        loops.append(loop(f"case_{k}", types, TYPES[result], found.text))
    return HEADERS + definitions(used) + "".join(loops)


def inputs(op: str, dtype: int, count: int) -> list[Any]:
    given = [numbers(dtype, seed) for seed in range(count)]
    if op == "Where":
        given[0] = given[1] < given[2]
    if op == "Clip":  # both orders of the bounds are in the standard only if the lower one is first
        given[1:] = np.minimum(given[1], given[2]), np.maximum(given[1], given[2])
        given = [g[~np.isnan(given[1] + 0.0)] for g in given]
    if op in ("Sin", "Cos"):
        given[0] = given[0][~(np.abs(given[0]) > 1e5)]
    return given


@functools.cache
def cases() -> ctypes.CDLL:
    return compiler.load_library(case_source(), ["-O0"])


@pytest.mark.parametrize(
    "k", range(len(EACH)), ids=lambda k: f"{EACH[k][0]}-{TYPES[EACH[k][1]]}-{k}"
)
@np.errstate(all="ignore")
def test_an_operator_is_that_of_numpy(k: int) -> None:
    op, dtype, count, to, _, reference = EACH[k]
    given = inputs(op, dtype, count)
    kind = numpy_dtype(dtype if to is None else to)
    found = call(cases(), f"case_{k}", kind, *given)
    wide = [g.astype(np.float64) if g.dtype == np.float32 and op != "Mean" else g for g in given]
    exact = reference(*wide)
    if kind.kind != "f":
        np.testing.assert_array_equal(found, exact)
        return
    # Intermediate results are rounded to the type: a result is as near as they are.
    span = np.maximum(np.abs(exact), np.finfo(kind).smallest_normal)
    near = np.abs(found - exact) <= 8 * np.finfo(kind).eps * np.maximum(span, op in ABSOLUTE)
    same = (found == np.asarray(exact).astype(kind)) | (np.isnan(found) & np.isnan(exact))
    assert (near | same).all(), [g[~(near | same)][:3] for g in [*given, found, exact]]


ABSOLUTE = ("HardSigmoid", "HardSwish", "Sin", "Cos", "Gelu", "Mish", "Swish")
"""Operators that round within a sum, an angle or an exponent; the error counts beside 1."""


def test_every_operator_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(operators())


@pytest.mark.parametrize("dtype", [F32, F64, I64, U64, BOOL, TensorProto.INT32])
def test_a_literal_has_its_value(dtype: int) -> None:
    kind = numpy_dtype(dtype)
    if kind.kind == "f":
        values = np.array([0, -0.0, 1, -1, 0.1, -0.1, 123456789, 1e-45, 3e38, *SPECIAL], kind)
    elif kind.kind == "b":
        values = np.array([False, True])
    else:
        bounds = np.iinfo(kind)
        values = np.array([0, 1, 7, bounds.max, bounds.min, bounds.max // 3], kind)
    listed = ", ".join(literal(v, dtype) for v in values)
    text = f"static const {TYPES[dtype]} v[] = {{ {listed} }};\n"
    library = compiler.load_library(
        HEADERS + text + loop("get", [TYPES[dtype]], TYPES[dtype], "v[i]")
    )
    found = call(library, "get", kind, values)
    np.testing.assert_array_equal(found, values)
    assert kind.kind != "f" or (np.signbit(found) == np.signbit(values)).all()
