"""Host scalars: float64 on the host, symbols while a formula is traced."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from ortflex_core import GraphError, Host, HostProgram, Trace
from ortflex_core.kernel.host_scalars import OPERATORS

BETA, STEP = Host.symbol("beta"), Host.symbol("step")


def value(expression: Host, **symbols: float) -> float:
    return HostProgram([expression])(symbols)[0]


def test_corrections_of_adam_are_computed_in_float64() -> None:
    assert value(1 - BETA**STEP, beta=0.999, step=1) == 1 - 0.999
    assert abs(float(np.float32(1) - np.float32(0.999)) - 0.001) > 1e-8


FORMULAS = ("b + 1", "1 + b", "b - 1", "1 - b", "b * 3", "3 * b", "b / 4", "4 / b")


@pytest.mark.parametrize("formula", [*FORMULAS, "b**3", "3**b", "-b"])
def test_python_arithmetic(formula: str) -> None:
    assert value(eval(formula, {"b": BETA}), beta=2) == eval(formula, {"b": 2.0})


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operators_mean_what_numpy_means(name: str) -> None:
    others = {"Sub": "subtract", "Mul": "multiply", "Div": "divide", "Pow": "power"}
    others |= {"Neg": "negative", "Min": "minimum", "Max": "maximum", "Identity": "positive"}
    function = getattr(np, others.get(name, name.lower()))
    numbers = (1.7, 0.6)[: function.nin]
    op = Trace({"": 17}).op
    found = op(name, *(Host.symbol(n) for n in "ab"[: function.nin]))
    assert isinstance(found, Host)
    assert value(found, a=1.7, b=0.6) == pytest.approx(float(function(*numbers)), rel=1e-15)


def test_common_subexpressions_are_computed_once() -> None:
    power = BETA**STEP
    program = HostProgram([1 - power, 2 - Host.apply("Pow", BETA, STEP)])
    assert program({"beta": 0.5, "step": 2}) == [0.75, 1.75]
    assert sum("**" in line for line in program._lines) == 1


def test_numbers_keep_their_sign_and_value() -> None:
    exponent = Host.apply("Pow", -2.0, STEP)
    assert value(exponent, step=2) == 4.0
    assert math.copysign(1, value(Host.apply("Mul", -0.0, STEP), step=1)) == -1
    assert value(Host.apply("Min", STEP, math.inf), step=3) == 3
    assert value(Host.apply("Max", STEP, 1.0, 7.0), step=3) == 7
    assert value(STEP * 0.1, step=1) == 0.1


def test_a_program_can_be_run_again_with_other_values() -> None:
    program = HostProgram([BETA, BETA * STEP, BETA])
    assert program({"beta": 2, "step": 3}) == [2, 6, 2]
    assert program({"beta": 5, "step": 1}) == [5, 5, 5]
    assert program.symbols == {"beta", "step"}


def test_equality_is_structural_and_keeps_the_sign_of_zero() -> None:
    assert Host.symbol("beta") * 2 == BETA * 2
    assert len({BETA + 1, 1 + BETA, Host.symbol("beta") + 1}) == 2
    positive, negative = HostProgram([BETA * 0.0, BETA * -0.0])({"beta": 1})
    assert math.copysign(1, positive) == 1
    assert math.copysign(1, negative) == -1


def test_a_condition_is_refused() -> None:
    with pytest.raises(GraphError, match=r"the host scalar beta has no value .* op\.Where"):
        bool(BETA)


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(GraphError, match="no value was given for the host scalar 'step'"):
        value(BETA**STEP, beta=0.9)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (1 / BETA, r"Div\(1.0, beta\) is undefined at \{'beta': 0\}.*zero"),
        (Host.apply("Log", BETA), r"Log\(beta\) is undefined at \{'beta': 0\}"),
        (Host.apply("Sqrt", BETA - 1), r"Sqrt\(Sub\(beta, 1.0\)\) is undefined at \{'beta': 0\}"),
        (BETA**-1, r"Pow\(beta, -1.0\) is undefined"),
    ],
)
def test_an_undefined_host_scalar_names_its_use(expression: Host, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        value(expression, beta=0)


def test_a_numpy_array_with_a_host_scalar_is_refused() -> None:
    with pytest.raises(TypeError):
        np.ones(3) * BETA


@pytest.mark.parametrize("kind", [int, float, np.float32, np.int64])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("swapped", [False, True])
def test_no_comparison_with_a_number_has_an_answer(name: str, kind: Any, swapped: bool) -> None:
    """The class of errors: a comparison that is decided while the formula is traced."""
    compare, number = getattr(operator, name), kind(1)
    with pytest.raises(GraphError, match=r"the host scalar step has no value.*op\.Where"):
        compare(number, STEP) if swapped else compare(STEP, number)


def test_symbols_have_no_order_but_equal_expressions_are_equal() -> None:
    with pytest.raises(GraphError, match="the host scalar step has no value"):
        _ = STEP < BETA
    assert 1 - BETA == 1 - BETA
    assert STEP != BETA
    assert STEP in {STEP: 1}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_numbers_between_two_cases_have_the_type_of_the_condition(dtype: Any) -> None:
    """``op.Where(g > 0, self.up, 1.0)`` is float64 in a model of float64."""
    trace = Trace({"": 17})
    op, g = trace.op, trace.input("g", dtype, ("N",))
    up = op.And(op.Greater(g, 0), op.Not(op.Less(g, 5)))
    for chosen in (op.Where(up, BETA, 1.0), op.Where(up, 0.5, BETA), op.Where(up, 0.5, 2.0)):
        assert chosen.dtype == g.dtype
    assert op.Where(up, 1, 0).dtype == TensorProto.INT64
    known = trace.input("flag", np.bool_, ("N",))
    assert op.Where(known, BETA, 1.0).dtype == TensorProto.FLOAT
