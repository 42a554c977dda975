"""Operators on elements: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import math
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from onnx import TensorProto

from ortflex_core import numpy_dtype
from ortflex_plugins.operators.calls import Call, NotTranslatable, Table, Value, along, is_float

TABLE = Table()

_TYPES = frozenset(
    (
        *("bool", "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
)

SAME = {
    "Abs": "abs",
    "Neg": "negative",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "rint",
    "Sign": "sign",
    "Sin": "sin",
    "Cos": "cos",
    "Tan": "tan",
    "Asin": "arcsin",
    "Acos": "arccos",
    "Atan": "arctan",
    "Sinh": "sinh",
    "Cosh": "cosh",
    "Tanh": "tanh",
    "Asinh": "arcsinh",
    "Acosh": "arccosh",
    "Atanh": "arctanh",
    "IsNaN": "isnan",
    "Not": "logical_not",
    "BitwiseNot": "invert",
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "And": "logical_and",
    "Or": "logical_or",
    "Xor": "logical_xor",
    "Equal": "equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Where": "where",
}
"""Operators that are functions of numpy."""


@TABLE(*SAME)
def _same(c: Call, *values: Value) -> Value:
    """Functions that both namespaces have."""
    return getattr(c.xp, SAME[c.name])(*values)


def _number(c: Call, x: Value, name: str, default: float) -> Value:
    """An attribute in the type of a tensor."""
    return c.xp.asarray(c.get(name, default), x.dtype)


def sigmoid(c: Call, x: Value) -> Value:
    """1 / (1 + e⁻ˣ), without an overflow."""
    small = c.xp.exp(-c.xp.abs(x))
    one = c.xp.asarray(1, x.dtype)
    return c.xp.where(x >= 0, one / (one + small), small / (one + small))


def _softplus(c: Call, x: Value) -> Value:
    return c.xp.maximum(x, c.xp.zeros((), x.dtype)) + c.xp.log1p(c.xp.exp(-c.xp.abs(x)))


TABLE.update(
    {
        "Identity": lambda c, x: x,
        "Reciprocal": lambda c, x: c.xp.asarray(1, x.dtype) / x,
        "Mod": lambda c, a, b: c.xp.fmod(a, b) if c.get("fmod", 0) else c.xp.mod(a, b),
        "Cast": lambda c, x: _converted(c, x, numpy_dtype(c.get("to"))),
        "CastLike": lambda c, x, like: _converted(c, x, like.dtype),
        "Erf": lambda c, x: c.forms.erf(x),
        "Relu": lambda c, x: c.xp.maximum(x, c.xp.zeros((), x.dtype)),
        "LeakyRelu": lambda c, x: c.xp.where(x >= 0, x, x * _number(c, x, "alpha", 0.01)),
        "PRelu": lambda c, x, slope: c.xp.where(x >= 0, x, x * slope),
        "ThresholdedRelu": lambda c, x: c.xp.where(
            x > _number(c, x, "alpha", 1.0), x, c.xp.zeros_like(x)
        ),
        "HardSigmoid": lambda c, x: c.xp.clip(
            x * _number(c, x, "alpha", 0.2) + _number(c, x, "beta", 0.5), 0, 1
        ),
        "HardSwish": lambda c, x: x * c.xp.clip(x / 6 + c.xp.asarray(0.5, x.dtype), 0, 1),
        "Sigmoid": sigmoid,
        "Softplus": _softplus,
        "Softsign": lambda c, x: x / (1 + c.xp.abs(x)),
        "Swish": lambda c, x: x * sigmoid(c, x * _number(c, x, "alpha", 1.0)),
        "Mish": lambda c, x: x * c.xp.tanh(_softplus(c, x)),
    }
)


@TABLE("Div")
def _div(c: Call, a: Value, b: Value) -> Value:
    if is_float(a):
        return a / b
    # Integers are divided towards zero.
    down = a // b
    return c.xp.where((a % b != 0) & ((a < 0) != (b < 0)), down + 1, down).astype(a.dtype)


@TABLE("Pow")
def _pow(c: Call, a: Value, b: Value) -> Value:
    if isinstance(b, np.ndarray) and b.ndim == 0 and float(b) in (1.0, 2.0, 3.0):
        return reduce(lambda x, y: x * y, [a] * int(b))
    if is_float(a) or not is_float(b):
        return c.xp.power(a, b.astype(a.dtype))
    return c.forms.convert(c.xp.power(a.astype(b.dtype), b), a.dtype)


@TABLE("Sum", "Max", "Min", "Mean")
def _variadic(c: Call, *values: Value) -> Value:
    name = {"Sum": "add", "Mean": "add", "Max": "maximum", "Min": "minimum"}[c.name]
    out = reduce(getattr(c.xp, name), values)
    return out / len(values) if c.name == "Mean" else out


@TABLE("BitShift")
def _bit_shift(c: Call, a: Value, b: Value) -> Value:
    width = a.dtype.itemsize * 8
    inside = c.xp.minimum(b, c.xp.asarray(width - 1, b.dtype))
    if c.get("direction") == "LEFT":
        return c.xp.where(b < width, c.xp.left_shift(a, inside), c.xp.zeros_like(a))
    beyond = c.xp.where(a < 0, c.xp.asarray(-1).astype(a.dtype), c.xp.zeros_like(a))
    return c.xp.where(b < width, c.xp.right_shift(a, inside), beyond)


def _converted(c: Call, x: Value, dtype: Any) -> Value:
    for kind in (x.dtype, np.dtype(dtype)):
        if kind.name not in _TYPES:
            raise NotTranslatable(f"{c.name} of {kind.name}")
    return c.forms.convert(x, dtype)


@TABLE("IsInf")
def _is_inf(c: Call, x: Value) -> Value:
    up, down = (x == math.inf, x == -math.inf)
    wanted = [up] * bool(c.get("detect_positive", 1)) + [down] * bool(c.get("detect_negative", 1))
    return reduce(or_, wanted, c.xp.zeros(x.shape, bool))


@TABLE("Clip")
def _clip(c: Call, x: Value, low: Value = None, high: Value = None) -> Value:
    low = c.get("min") if low is None else low
    high = c.get("max") if high is None else high
    if low is not None:
        x = c.xp.maximum(x, c.xp.asarray(low, x.dtype))
    return x if high is None else c.xp.minimum(x, c.xp.asarray(high, x.dtype))


@TABLE("Elu", "Selu", "Celu")
def _elu(c: Call, x: Value) -> Value:
    alpha, gamma = {
        "Elu": (c.get("alpha", 1.0), 1.0),
        "Celu": (c.get("alpha", 1.0), 1.0),
        "Selu": (c.get("alpha", 1.67326319217681884765625), c.get("gamma", 1.0507009873554804)),
    }[c.name]
    inner = c.xp.minimum(x, c.xp.zeros((), x.dtype))
    bent = c.xp.expm1(inner / c.xp.asarray(alpha, x.dtype) if c.name == "Celu" else inner)
    below = c.xp.asarray(alpha * gamma, x.dtype) * bent
    return c.xp.where(x > 0, c.xp.asarray(gamma, x.dtype) * x, below)


@TABLE("Gelu")
def _gelu(c: Call, x: Value) -> Value:
    half, one = c.xp.asarray(0.5, x.dtype), c.xp.asarray(1, x.dtype)
    if c.get("approximate", "none") == "tanh":
        cubed = x + c.xp.asarray(0.044715, x.dtype) * x * x * x
        return half * x * (one + c.xp.tanh(c.xp.asarray(math.sqrt(2 / math.pi), x.dtype) * cubed))
    return half * x * (one + c.forms.erf(x * c.xp.asarray(math.sqrt(0.5), x.dtype)))


@TABLE("Shrink")
def _shrink(c: Call, x: Value) -> Value:
    bound, bias = _number(c, x, "lambd", 0.5), _number(c, x, "bias", 0.0)
    zero = c.xp.zeros_like(x)
    return c.xp.where(x < -bound, x + bias, c.xp.where(x > bound, x - bias, zero))


@TABLE("Dropout", attributes=("seed",))
def _dropout(c: Call, x: Value, ratio: Value = None, training: Value = None) -> Any:
    if training is not None and bool(c.known(training, "mode")):
        raise NotTranslatable("a Dropout that draws by itself; ortflex replaces it by its own")
    return (x, c.xp.ones(x.shape, bool))[: c.outputs]


@TABLE("QuantizeLinear", "DequantizeLinear")
def _quantize(c: Call, x: Value, scale: Value, zero: Value = None) -> Value:
    if c.get("block_size", 0):
        raise NotTranslatable(f"{c.name} by blocks")
    axis = c.get("axis", 1)
    if scale.ndim == 1 and x.ndim:
        scale = along(scale, axis, x.ndim)
        zero = None if zero is None else zero.reshape(scale.shape)
    if c.name == "DequantizeLinear":
        if c.get("output_dtype", 0):
            raise NotTranslatable("DequantizeLinear with output_dtype")
        wide = x.astype(scale.dtype)
        return (wide if zero is None else wide - zero.astype(scale.dtype)) * scale
    wanted = c.get("output_dtype", 0) or TensorProto.UINT8
    dtype = np.dtype(numpy_dtype(wanted)) if zero is None else np.dtype(zero.dtype)
    if dtype.kind not in "iu":
        raise NotTranslatable(f"QuantizeLinear to {dtype}")
    bounds = np.iinfo(dtype)
    levels = c.xp.rint(x / scale.astype(x.dtype))
    levels = levels if zero is None else levels + zero.astype(levels.dtype)
    return c.xp.clip(levels, bounds.min, bounds.max).astype(dtype)
