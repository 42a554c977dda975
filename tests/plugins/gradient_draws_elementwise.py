"""Draws of the operators that work element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np

from ortflex_core import Array
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import (
    F32,
    Draw,
    Draws,
    drawn,
    numbers,
    shapes,
    smaller,
    tenths,
    together,
    torch,
)

DRAWS = Draws()
BOOL, DOUBLE = 9, 11

_erf = np.vectorize(math.erf)


def _celu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(x / alpha))


@attrs.frozen
class Unary:
    """Where an operator is defined, its attributes, and what it is in torch."""

    torch: Callable[..., Any] | None
    low: float = -2.0
    high: float = 2.0
    attributes: Mapping[str, st.SearchStrategy[Any]] = attrs.field(factory=dict)
    since: int = 13
    oracle: Callable[..., Any] | None = None


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "none":
        return 0.5 * x * (1 + _erf(x / np.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _f() -> Any:
    return torch.nn.functional


UNARY = {
    "Identity": Unary(lambda x: x.clone()),
    "Neg": Unary(lambda x: -x),
    "Abs": Unary(lambda x: x.abs()),
    "Exp": Unary(lambda x: x.exp()),
    "Sin": Unary(lambda x: x.sin()),
    "Cos": Unary(lambda x: x.cos()),
    "Tan": Unary(lambda x: x.tan(), -1, 1),
    "Asin": Unary(lambda x: x.asin(), -0.9, 0.9),
    "Acos": Unary(lambda x: x.acos(), -0.9, 0.9),
    "Atan": Unary(lambda x: x.atan()),
    "Sinh": Unary(lambda x: x.sinh()),
    "Cosh": Unary(lambda x: x.cosh()),
    "Tanh": Unary(lambda x: x.tanh()),
    "Asinh": Unary(lambda x: x.asinh()),
    "Acosh": Unary(lambda x: x.acosh(), 1.2, 3),
    "Atanh": Unary(lambda x: x.atanh(), -0.9, 0.9),
    "Sqrt": Unary(lambda x: x.sqrt(), 0.5, 3),
    "Log": Unary(lambda x: x.log(), 0.5, 3),
    "Reciprocal": Unary(lambda x: 1 / x, 0.5, 3),
    "Sigmoid": Unary(lambda x: x.sigmoid()),
    "Relu": Unary(lambda x: x.relu()),
    "Softplus": Unary(lambda x: _f().softplus(x)),
    "Softsign": Unary(lambda x: _f().softsign(x), oracle=lambda x: x / (1 + abs(x))),
    "Erf": Unary(lambda x: x.erf(), oracle=lambda x: _erf(x)),
    "HardSwish": Unary(lambda x: _f().hardswish(x), -5, 5, since=14),
    "Mish": Unary(lambda x: _f().mish(x), -4, 4, since=18),
    "LeakyRelu": Unary(
        lambda x, alpha=0.01: _f().leaky_relu(x, alpha), attributes={"alpha": tenths(-5, 15)}
    ),
    "Elu": Unary(lambda x, alpha=1.0: _f().elu(x, alpha), attributes={"alpha": tenths(1, 20)}),
    "Selu": Unary(
        lambda x, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875: (
            gamma * _f().elu(x, alpha)
        ),
        attributes={"alpha": tenths(1, 20), "gamma": tenths(1, 20)},
    ),
    "Celu": Unary(
        lambda x, alpha=1.0: _f().celu(x, alpha),
        attributes={"alpha": tenths(3, 20)},
        oracle=lambda x, alpha=1.0: _celu(x, alpha),
    ),
    "ThresholdedRelu": Unary(
        lambda x, alpha=1.0: _f().threshold(x, alpha, 0.0), attributes={"alpha": tenths(0, 19)}
    ),
    "HardSigmoid": Unary(
        lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
        attributes={"alpha": tenths(1, 9), "beta": tenths(-5, 9)},
    ),
    "Gelu": Unary(
        lambda x, approximate="none": _f().gelu(x, approximate=approximate),
        attributes={"approximate": st.sampled_from(["none", "tanh"])},
        since=20,
        oracle=_gelu,
    ),
    "Shrink": Unary(
        lambda x, bias=0.0, lambd=0.5: torch.where(
            x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0 * x)
        ),
        attributes={"bias": tenths(-5, 9), "lambd": tenths(0, 15)},
        oracle=lambda x, bias=0.0, lambd=0.5: np.where(
            x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)
        ),
    ),
    "Swish": Unary(
        lambda x, alpha=1.0: x * (alpha * x).sigmoid(),
        attributes={"alpha": tenths(-20, 20)},
        since=24,
        oracle=lambda x, alpha=1.0: x / (1 + np.exp(-alpha * x)),
    ),
}


@DRAWS.of(*UNARY)
def unary(draw: Draw, operator: str) -> Case:
    what = UNARY[operator]
    x = numbers(draw, draw(shapes(high=4)), what.low, what.high)
    options = draw(st.fixed_dictionaries({}, optional=dict(what.attributes)))
    fields: dict[str, Any] = {"since": what.since}
    if what.oracle is not None:
        fields |= {"oracle": lambda x: what.oracle(x, **options), "dtypes": F32}  # type: ignore[misc]
    if what.torch is not None:
        fields["torch"] = lambda x: what.torch(x, **options)  # type: ignore[misc]
    return drawn(
        f"{operator} {options}", lambda op, x: op(operator, x, **options), {"x": x}, **fields
    )


BINARY: dict[str, Callable[..., Any]] = {
    "Add": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Div": lambda x, y: x / y,
}


@DRAWS.of(*BINARY)
def binary(draw: Draw, operator: str) -> Case:
    low = 0.5 if operator == "Div" else -2.0
    if draw(st.integers(0, 3)) == 0:  # the same tensor on both sides, and once more below
        x = numbers(draw, draw(shapes()), low)
        return drawn(
            f"{operator} of itself",
            lambda op, x: op.Add(op(operator, x, x), op.Sin(x)),
            {"x": x},
            torch=lambda x: BINARY[operator](x, x) + x.sin(),
        )
    one, two = draw(together(2))
    x, y = numbers(draw, one), numbers(draw, two, low, salt=1)
    formula = lambda op, x, y: op(operator, x, y)  # noqa: E731
    return drawn(operator, formula, {"x": x, "y": y}, torch=BINARY[operator])


@DRAWS.of("Max", "Min", "Sum", "Mean")
def variadic(draw: Draw, operator: str) -> Case:
    every = draw(together(draw(st.integers(1, 4))))
    arrays = {f"x{k}": numbers(draw, s, salt=k) for k, s in enumerate(every)}
    again = draw(st.booleans())  # the first one twice

    def formula(op: Any, **xs: Any) -> Any:
        return op(operator, *xs.values(), *([xs["x0"]] if again else []))

    def in_torch(**xs: Any) -> Any:
        parts = torch.broadcast_tensors(*xs.values(), *([xs["x0"]] if again else []))
        stacked = torch.stack(parts)
        if operator in ("Max", "Min"):
            return stacked.amax(0) if operator == "Max" else stacked.amin(0)
        return stacked.sum(0) if operator == "Sum" else stacked.mean(0)

    def oracle(**xs: Any) -> Any:
        return sum(xs.values(), start=xs["x0"] if again else 0.0) / (len(xs) + again)

    # onnx's reference of Mean does not broadcast, and onnxruntime has no kernel for float64.
    fields = {"oracle": oracle, "dtypes": F32} if operator == "Mean" else {}
    return drawn(f"{operator} again={again}", formula, arrays, torch=in_torch, **fields)


@DRAWS.of("Pow")
def power(draw: Draw, operator: str) -> Case:
    one, two = draw(together(2))
    kind = draw(st.sampled_from(["constant", "integer", "constants", "tensor"]))
    if kind in ("tensor", "integer"):
        low, exponents = 0.5, numbers(draw, two)
        if kind == "integer":
            low, exponents = -2.0, random_integers(draw, two)
        arrays = {"x": numbers(draw, one, low), "e": exponents}
        formula = lambda op, x, e: op.Pow(x, e)  # noqa: E731
        return drawn(f"Pow by {kind}", formula, arrays, torch=lambda x, e: x**e)
    shape = (1,) * draw(st.integers(0, 2)) if kind == "constant" else two
    value = draw(st.sampled_from([0, 0.5, 1, 1.3, 2, 3, 4, -1, -2.5]))
    values = np.full(shape, value)
    if kind == "constants":
        values = values + np.arange(int(np.prod(two))).reshape(two)
    whole = value in (0, 1, 2, 3, 4)
    return drawn(
        f"Pow by {values.tolist()}",
        lambda op, x: op.Pow(x, op.constant(values, x.dtype)),
        {"x": numbers(draw, one, -2.0 if whole else 0.5)},
        torch=lambda x: x ** torch.tensor(values),
    )


def random_integers(draw: Draw, shape: tuple[int, ...]) -> Any:
    count = int(np.prod(shape))
    return np.array([draw(st.integers(0, 4)) for _ in range(count)], np.int64).reshape(shape)


@DRAWS.of("Mod")
def modulus(draw: Draw, operator: str) -> Case:
    one, two = draw(together(2))
    sign = draw(st.sampled_from([-1, 1]))
    return drawn(
        "Mod",
        lambda op, x, y: op.Mod(x, y, fmod=1),
        {"x": 3 * numbers(draw, one), "y": sign * numbers(draw, two, 0.6, 1.4)},
        torch=lambda x, y: torch.fmod(x, y),
    )


@DRAWS.of("Clip")
def clip(draw: Draw, operator: str) -> Case:
    """Bounds are constants, inputs, or left out; the lower one may be the higher."""
    low, high = (
        draw(st.tuples(st.sampled_from(["none", "constant", "input"]), tenths(-19, 19)))
        for _ in range(2)
    )
    arrays = {"x": numbers(draw, draw(shapes()))}
    for name, (kind, value), more in (("low", low, 0.01), ("high", high, 0.02)):
        if kind == "input":
            arrays[name] = np.array(value + more)

    def bounds(of: Any, given: Mapping[str, Any]) -> list[Any]:
        return [
            given[name] if kind == "input" else of(value + 0.03) if kind == "constant" else None
            for name, (kind, value) in (("low", low), ("high", high))
        ]

    def in_torch(x: Any, **given: Any) -> Any:
        a, b = bounds(lambda v: torch.tensor(v, dtype=x.dtype), given)
        return x if a is None and b is None else torch.clamp(x, a, b)

    def formula(op: Any, x: Any, **given: Any) -> Any:
        return op.Clip(x, *bounds(lambda v: op.constant(v, x.dtype), given))

    # Of bounds in the wrong order torch's own gradient is another: none for the upper one.
    fields = {} if arrays.keys() - {"x"} else {"torch": in_torch}
    return drawn(f"Clip {low} {high}", formula, arrays, **fields)


@DRAWS.of("Where")
def where(draw: Draw, operator: str) -> Case:
    mask, one, two = draw(together(3))
    arrays = {
        "x": numbers(draw, one),
        "y": numbers(draw, two),
        "c": np.asarray(numbers(draw, mask) > 0),
    }
    if draw(st.booleans()):
        arrays.pop("y")
        return drawn(
            "Where both are one",
            lambda op, x, c: op.Where(c, x, op.Where(op.Not(c), x, 2.0)),
            arrays,
            torch=lambda x, c: torch.where(c, x, torch.where(~c, x, 2.0)),
        )
    return drawn(
        "Where",
        lambda op, x, y, c: op.Where(c, x, y),
        arrays,
        torch=lambda x, y, c: torch.where(c, x, y),
    )


@DRAWS.of("PRelu")
def prelu(draw: Draw, operator: str) -> Case:
    shape = draw(shapes())
    slopes = smaller(draw, shape)
    return drawn(
        "PRelu",
        lambda op, x, s: op.PRelu(x, s),
        {"x": numbers(draw, shape), "s": numbers(draw, slopes)},
        since=16,
        torch=lambda x, s: torch.where(x > 0, x, s * x),
    )


@DRAWS.of("Cast", "CastLike")
def cast(draw: Draw, operator: str) -> Case:
    """To double precision and back, in which something is computed."""
    x, power_ = numbers(draw, draw(shapes())), draw(st.integers(1, 3))

    def formula(op: Any, x: Any) -> Any:
        if operator == "Cast":
            return op.Cast(op.Cast(x, to=DOUBLE) ** power_, to=x.dtype)
        return op.CastLike(op.CastLike(x, op.constant(1.0, DOUBLE)) ** power_, x)

    since = 13 if operator == "Cast" else 15
    return drawn(
        f"{operator} ** {power_}", formula, {"x": x}, since=since, torch=lambda x: x**power_
    )


@DRAWS.of("Dropout")
def dropout(draw: Draw, operator: str) -> Case:
    """What is deterministic of it: no training, or nothing dropped."""
    training = draw(st.sampled_from([None, "constant", "input"]))
    ratio = draw(st.sampled_from([None, 0.4])) if training is None else 0.0
    on = draw(st.booleans())
    arrays = {"x": numbers(draw, draw(shapes()))}
    if training == "input":
        arrays["t"] = np.array(on)

    def formula(op: Any, x: Any, t: Any = None) -> Any:
        flag = op.constant(on, BOOL) if training == "constant" else t
        share = None if ratio is None else op.constant(ratio, x.dtype)
        return op.Dropout(x, share, flag)

    return drawn(f"Dropout {ratio} {training} {on}", formula, arrays, torch=lambda x, t=None: x * 1)
