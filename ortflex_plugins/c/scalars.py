"""Elementwise operators of ONNX as expressions of C.

An expression is computed from one number of each operand. It has no branch, so compilers vectorize
the loop around it, and no operation that C leaves undefined: integers wrap, a division by zero is 0,
a cast of a number that is out of range is the smallest integer, as on x86.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core import numpy_dtype, onnx_dtype
from ortflex_plugins.c.functions import FUNCTIONS, called_in

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bool": "uint8_t",
    **{f"{kind}{bits}": f"{kind}{bits}_t" for bits in (8, 16, 32, 64) for kind in ("int", "uint")},
}
"""The types of elements, and their names in C."""
TYPES = {onnx_dtype(np.dtype(name)): text for name, text in C_TYPES.items()}
"""The types of C by the types of ONNX."""
HEADERS = "#include <math.h>\n#include <stdint.h>\n#include <string.h>\n"
"""What a file needs before :func:`ortflex_plugins.c.functions.definitions` and these expressions."""


@attrs.frozen
class Expression:
    """An expression, and the functions of :mod:`ortflex_plugins.c.functions` that it calls."""

    text: str
    calls: frozenset[str] = frozenset()


@attrs.frozen
class Call:
    """An operator on one number of each operand.

    Attributes:
        dtype: the type of the operands (ONNX), which have one type except the condition of Where.
        arguments: expressions without side effects: a name, an element of an array, a literal.
        attributes: of the operator.
        to: the type of the result.
    """

    dtype: int
    arguments: tuple[str, ...]
    attributes: Mapping[str, Any]
    to: int

    @property
    def is_float(self) -> bool:
        """Whether the operands are float32 or float64."""
        return self.dtype in (TensorProto.FLOAT, TensorProto.DOUBLE)

    @property
    def unsigned(self) -> str:
        """The unsigned type of the same width, at least 32 bits: its arithmetic wraps."""
        return "uint64_t" if numpy_dtype(self.dtype).itemsize == 8 else "uint32_t"

    def get(self, name: str, default: float) -> str:
        """An attribute as a literal of the type of the operands."""
        return literal(float(self.attributes.get(name, default)), self.dtype)

    def number(self, value: float) -> str:
        """A number as a literal of the type of the operands."""
        return literal(value, self.dtype)


_Rule = Callable[..., str | None]
_RULES: dict[str, _Rule] = {}


def operators() -> tuple[str, ...]:
    """The operators that have an expression for some types."""
    return tuple(sorted(_RULES))


def expression(
    operator: str,
    dtype: int,
    arguments: Sequence[str],
    attributes: Mapping[str, Any] | None = None,
    to: int | None = None,
) -> Expression | None:
    """The expression of an elementwise operator, or None if it has none.

    Args:
        operator: of the standard.
        dtype: the type of the operands; of Where, of the two values.
        arguments: the operands in C, each without side effects. One that is None in ONNX (a bound of
            Clip) is "".
        attributes: of the operator, as numbers, strings and lists.
        to: the type of the result; the type of the operands if it is None.

    Example:
        >>> expression("Add", TensorProto.FLOAT, ["a[i]", "b[i]"]).text
        '(a[i] + b[i])'
        >>> expression("Tanh", TensorProto.FLOAT, ["x"])
        Expression(text='f32_tanh(x)', calls=frozenset({'f32_tanh'}))
        >>> expression("Tanh", TensorProto.INT64, ["x"]) is None
        True
    """
    rule = _RULES.get(operator)
    if rule is None or dtype not in TYPES:
        return None
    call = Call(dtype, tuple(arguments), attributes or {}, dtype if to is None else to)
    text = rule(call, *arguments)
    if text is None:
        return None
    return Expression(text, called_in(text))


def literal(value: float | bool | np.generic, dtype: int) -> str:
    """A constant of C with exactly this value.

    Example:
        >>> literal(0.1, TensorProto.FLOAT), literal(-math.inf, TensorProto.DOUBLE)
        ('0x1.99999a0000000p-4f', '-(double)INFINITY')
        >>> literal(np.iinfo(np.int64).min, TensorProto.INT64)
        'INT64_MIN'
    """
    if dtype in (TensorProto.FLOAT, TensorProto.DOUBLE):
        number = float(numpy_dtype(dtype).type(value))
        suffix = "f" if dtype == TensorProto.FLOAT else ""
        if math.isnan(number):
            return f"({TYPES[dtype]})NAN"
        if math.isinf(number):
            return f"{'-' * (number < 0)}({TYPES[dtype]})INFINITY"
        if number == int(number) and abs(number) < 1e6 and math.copysign(1, number) > 0:
            return f"{number:.1f}{suffix}"
        text = number.hex()
        return f"({text}{suffix})" if text[0] == "-" else f"{text}{suffix}"
    if dtype == TensorProto.BOOL:
        return str(int(bool(value)))
    whole = int(value)
    if whole == np.iinfo(np.int64).min:
        return "INT64_MIN"
    if dtype == TensorProto.UINT64:
        return f"UINT64_C({whole})"
    if dtype == TensorProto.INT64 and abs(whole) > 2**31 - 1:
        return f"INT64_C({whole})" if whole >= 0 else f"(-INT64_C({-whole}))"
    if whole == -(2**31):
        return "INT32_MIN"
    return f"({whole})" if whole < 0 else str(whole)


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _arithmetic(symbol: str) -> _Rule:
    def rule(c: Call, a: str, b: str) -> str:
        if c.is_float:
            return f"({a} {symbol} {b})"
        return f"(({TYPES[c.dtype]})(({c.unsigned}){a} {symbol} ({c.unsigned}){b}))"

    return rule


def _own(name: str) -> _Rule:
    """A function of :mod:`ortflex_plugins.c.functions`, for the types for which there is one."""

    def rule(c: Call, x: str) -> str | None:
        called = f"{_prefix(c)}_{name}"
        return f"{called}({x})" if called in FUNCTIONS else None

    return rule


def _suffix(c: Call) -> str:
    return "f" if c.dtype == TensorProto.FLOAT else ""


def _prefix(c: Call) -> str:
    prefixes: dict[int, str] = {TensorProto.FLOAT: "f32", TensorProto.DOUBLE: "f64"}
    return prefixes.get(c.dtype, "")


_RULES |= {
    "Identity": lambda c, x: x,
    "And": lambda c, a, b: f"({a} & {b})",
    "Or": lambda c, a, b: f"({a} | {b})",
    "Xor": lambda c, a, b: f"({a} ^ {b})",
    "Not": lambda c, x: f"({x} == 0)",
    "IsNaN": lambda c, x: f"({x} != {x})",
    "Equal": lambda c, a, b: f"({a} == {b})",
    "Less": lambda c, a, b: f"({a} < {b})",
    "LessOrEqual": lambda c, a, b: f"({a} <= {b})",
    "Greater": lambda c, a, b: f"({a} > {b})",
    "GreaterOrEqual": lambda c, a, b: f"({a} >= {b})",
    "Where": lambda c, condition, a, b: f"({condition} ? {a} : {b})",
    "Relu": lambda c, x: f"({x} < {c.number(0)} ? {c.number(0)} : {x})",
    "PRelu": lambda c, x, slope: f"({x} < {c.number(0)} ? {slope} * {x} : {x})",
    "Add": _arithmetic("+"),
    "Sub": _arithmetic("-"),
    "Mul": _arithmetic("*"),
}
_RULES |= {
    name: _own(name.lower())
    for name in ("Exp", "Log", "Tanh", "Erf", "Sigmoid", "Softplus", "Sin", "Cos")
}


@_rule("Div")
def _div(c: Call, a: str, b: str) -> str:
    if c.is_float:
        return f"({a} / {b})"
    kind = TYPES[c.dtype]
    if numpy_dtype(c.dtype).kind == "u":
        return f"({kind})({b} == 0 ? 0 : {a} / ({b} == 0 ? 1 : {b}))"
    # The smallest number divided by -1 would be too large.
    negative = f"({kind})(0u - ({c.unsigned}){a})"
    return f"({b} == 0 ? 0 : {b} == -1 ? {negative} : {a} / ({b} == 0 ? 1 : {b}))"


@_rule("Mod")
def _mod(c: Call, a: str, b: str) -> str | None:
    if c.is_float:
        return f"fmod{_suffix(c)}({a}, {b})" if c.attributes.get("fmod", 0) else None
    rest = f"({b} == 0 || {b} == -1 ? 0 : {a} % ({b} == 0 ? 1 : {b}))"
    if numpy_dtype(c.dtype).kind == "u":
        return f"({b} == 0 ? 0 : {a} % ({b} == 0 ? 1 : {b}))"
    if c.attributes.get("fmod", 0):
        return rest
    return f"({rest} != 0 && ({rest} < 0) != ({b} < 0) ? {rest} + {b} : {rest})"


@_rule("Neg")
def _neg(c: Call, x: str) -> str:
    return f"(-{x})" if c.is_float else f"(({TYPES[c.dtype]})(0u - ({c.unsigned}){x}))"


@_rule("Abs")
def _abs(c: Call, x: str) -> str:
    if c.is_float:
        return f"fabs{_suffix(c)}({x})"
    return x if numpy_dtype(c.dtype).kind == "u" else f"({x} < 0 ? {_neg(c, x)} : {x})"


@_rule("Sign")
def _sign(c: Call, x: str) -> str:
    zero, one = c.number(0), c.number(1)
    if c.is_float:  # of NaN: NaN
        return f"({x} > {zero} ? {one} : {x} < {zero} ? -{one} : {x} == {zero} ? {zero} : {x})"
    return f"(({x} > 0) - ({x} < 0))"


@_rule("Pow")
def _pow(c: Call, x: str, y: str) -> str | None:
    if y in (c.number(2), c.number(3)):
        return f"({x} * {x})" if y == c.number(2) else f"({x} * {x} * {x})"
    if y == c.number(1):
        return x
    if y == c.number(0.5) and c.is_float:
        # pow(-0, 0.5) and pow(-inf, 0.5) differ from sqrt.
        zero, inf = c.number(0), c.number(math.inf)
        root = f"sqrt{_suffix(c)}({x})"
        return f"({x} == {zero} ? {zero} : {x} == -{inf} ? {inf} : {root})"
    return f"{_prefix(c)}_pow({x}, {y})" if c.is_float else None


def _choosing(symbol: str) -> _Rule:
    """Max and Min, which are NaN if one operand is, as in numpy."""

    def rule(c: Call, *values: str) -> str | None:
        if len(values) == 1:
            return values[0]
        if len(values) != 2:
            return None  # the caller has two at a time
        a, b = values
        nan = f" || {a} != {a}" if c.is_float else ""
        return f"({a} {symbol} {b}{nan} ? {a} : {b})"

    return rule


_RULES |= {"Max": _choosing(">"), "Min": _choosing("<")}


@_rule("BitShift")
def _bit_shift(c: Call, a: str, b: str) -> str | None:
    kind = numpy_dtype(c.dtype)
    if kind.kind != "u":
        return None
    symbol = "<<" if c.attributes.get("direction") == "LEFT" else ">>"
    last = kind.itemsize * 8 - 1
    # A shift by the width or more is not defined.
    moved = f"({c.unsigned}){a} {symbol} ({b} & {last}u)"
    return f"({TYPES[c.dtype]})({b} > {last}u ? 0u : {moved})"


@_rule("IsInf")
def _is_inf(c: Call, x: str) -> str:
    inf = c.number(math.inf)
    signs = [
        sign
        for sign, name in (("", "detect_positive"), ("-", "detect_negative"))
        if c.attributes.get(name, 1)
    ]
    return "(" + (" | ".join(f"({x} == {sign}{inf})" for sign in signs) or "0") + ")"


@_rule("Cast")
def _cast(c: Call, x: str) -> str | None:
    if c.to not in TYPES:
        return None
    to = TYPES[c.to]
    if c.to == TensorProto.BOOL:
        return f"({x} != 0)"
    kind = numpy_dtype(c.to)
    if not c.is_float or kind.kind == "f":
        return x if c.to == c.dtype else f"(({to}){x})"
    # Between the bounds, of which the upper one is a power of 2, so that both types have it.
    bounds = np.iinfo(kind)
    low, high = c.number(bounds.min), c.number(float(bounds.max // 2 + 1) * 2)
    beyond = literal(bounds.min, c.to)
    inside = f"{x} >= {low} && {x} < {high}" if bounds.min else f"{x} > -1 && {x} < {high}"
    return f"({inside} ? ({to}){x} : ({to}){beyond})"


@_rule("Clip")
def _clip(_: Call, x: str, low: str = "", high: str = "") -> str:
    # The upper bound counts if both exclude one another.
    bounded = f"({x} < {low} ? {low} : {x})" if low else x
    return f"({bounded} > {high} ? {high} : {bounded})" if high else bounded


# Of some types ---------------------------------------------------------------------------------------


def _if(holds: Callable[[Call], bool], formula: _Rule) -> _Rule:
    """A rule for some types of operands only."""
    return lambda c, *values: formula(c, *values) if holds(c) else None


def _unit(c: Call, x: str) -> str | None:
    """A number clipped to 0 … 1."""
    return _clip(c, x, c.number(0), c.number(1))


def _exponential(c: Call, x: str, inside: str, alpha: str) -> str:
    return f"({x} > {c.number(0)} ? {x} : {alpha} * f32_expm1({inside}))"


def _gelu(c: Call, x: str) -> str:
    half, one = c.number(0.5), c.number(1)
    if c.attributes.get("approximate", "none") == "tanh":
        inner = (
            f"{c.number(math.sqrt(2 / math.pi))} * ({x} + {c.number(0.044715)} * {x} * {x} * {x})"
        )
        return f"({half} * {x} * ({one} + f32_tanh({inner})))"
    return f"({half} * {x} * ({one} + f32_erf({c.number(math.sqrt(0.5))} * {x})))"


_FLOATS: Mapping[str, _Rule] = {
    # Functions of math.h that are exact, or round correctly.
    "Sqrt": lambda c, x: f"sqrt{_suffix(c)}({x})",
    "Floor": lambda c, x: f"floor{_suffix(c)}({x})",
    "Ceil": lambda c, x: f"ceil{_suffix(c)}({x})",
    "Round": lambda c, x: f"rint{_suffix(c)}({x})",
    "Reciprocal": lambda c, x: f"({c.number(1)} / {x})",
    "Sum": lambda c, *values: f"({' + '.join(values)})",
    "Mean": lambda c, *values: f"(({' + '.join(values)}) / {c.number(len(values))})",
    "LeakyRelu": lambda c, x: f"({x} < {c.number(0)} ? {c.get('alpha', 0.01)} * {x} : {x})",
    "ThresholdedRelu": lambda c, x: f"({x} > {c.get('alpha', 1.0)} ? {x} : {c.number(0)})",
    "HardSigmoid": lambda c, x: _unit(c, f"({c.get('alpha', 0.2)} * {x} + {c.get('beta', 0.5)})"),
    "HardSwish": lambda c, x: f"({x} * {_unit(c, f'({c.number(1 / 6)} * {x} + {c.number(0.5)})')})",
    "Softsign": lambda c, x: f"({x} / ({c.number(1)} + {_abs(c, x)}))",
    "Swish": lambda c, x: f"({x} * {_prefix(c)}_sigmoid({c.get('alpha', 1.0)} * {x}))",
}
_FLOAT32: Mapping[str, _Rule] = {
    "Elu": lambda c, x: _exponential(c, x, x, c.get("alpha", 1.0)),
    "Selu": lambda c, x: (
        f"({c.get('gamma', 1.05070102214813232421875)} * "
        f"{_exponential(c, x, x, c.get('alpha', 1.67326319217681884765625))})"
    ),
    "Celu": lambda c, x: _exponential(c, x, f"{x} / {c.get('alpha', 1.0)}", c.get("alpha", 1.0)),
    "Mish": lambda c, x: f"({x} * f32_tanh(f32_softplus({x})))",
    "Gelu": _gelu,
}
_WHOLE: Mapping[str, _Rule] = {
    "BitwiseAnd": lambda c, a, b: f"({a} & {b})",
    "BitwiseOr": lambda c, a, b: f"({a} | {b})",
    "BitwiseXor": lambda c, a, b: f"({a} ^ {b})",
    "BitwiseNot": lambda c, x: f"(({TYPES[c.dtype]})~{x})",
}
_RULES |= {name: _if(lambda c: c.is_float, rule) for name, rule in _FLOATS.items()}
_RULES |= {
    name: _if(lambda c: c.dtype == TensorProto.FLOAT, rule) for name, rule in _FLOAT32.items()
}
_RULES |= {name: _if(lambda c: not c.is_float, rule) for name, rule in _WHOLE.items()}
