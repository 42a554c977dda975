"""The kit of gradient rules rejects planted mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from ortflex_core import GradientCase, GradientKit
from ortflex_core.compiler.autodiff.reverse import Rules
from tests.core.planted import Planted, PlantedMistakes, Subject, normal

pytestmark = pytest.mark.once


def family(rule: Any) -> Rules:
    rules = Rules()
    rules.rule("SquareSum", domain="conformance")(rule)
    return rules


def right(op: Any, node: Any, g: Any) -> Any:
    """Rows of squares, summed: ``2·x·g``."""
    return [2 * node.inputs[0] * op.Unsqueeze(g, axes=[1])]


def half(op: Any, node: Any, g: Any) -> Any:
    return [node.inputs[0] * op.Unsqueeze(g, axes=[1])]


def size_only(op: Any, node: Any, g: Any) -> Any:
    return [2 * node.inputs[0] * op.Unsqueeze(op.Abs(g), axes=[1])]


def whole_only(op: Any, node: Any, g: Any) -> Any:
    rows = node.inputs[0].shape[0]
    columns = op.Reshape(g, op.constant([rows if isinstance(rows, int) else -1, 1]))
    return [2 * node.inputs[0] * columns]


def sizes_only(op: Any, node: Any, g: Any) -> Any:
    rows = int(node.inputs[0].shape[0])
    return [2 * node.inputs[0] * op.Expand(op.Unsqueeze(g, axes=[1]), op.constant([rows, 1]))]


def float64_only(op: Any, node: Any, g: Any) -> Any:
    x = node.inputs[0]
    return [op.Cast(op.Constant(value_float=2.0), to=11) * x * op.Unsqueeze(g, axes=[1])]


def square_sum(x: Any) -> Any:
    return (x**2).sum(axis=1)


CASE = GradientCase(
    op_type="SquareSum", domain="conformance", opset=1, inputs=[normal(3, 2)], reference=square_sum
)
FAMILIES = [
    Planted("test_entry_point", family(right), "the family is not registered"),
    Planted(
        "test_every_rule_has_a_case", family(right), "no case calls con.*SquareSum", {"cases": []}
    ),
    Planted(
        "test_gradient",
        family(size_only),
        "the gradient of SquareSum by input 0",
        {"of": "cotangents below 0"},
    ),
    Planted("test_gradient", family(half), "the gradient of SquareSum by input 0"),
    Planted("test_small_cotangent", family(whole_only), "Reshape"),
    Planted("test_unknown_sizes", family(sizes_only), "invalid literal for int|NoneType"),
    Planted("test_float32", family(float64_only), "ill-typed"),
]


class TestGradients(PlantedMistakes):
    subjects = (
        Subject(
            GradientKit,
            family(right),
            FAMILIES,
            {"cases": [CASE]},
            frozenset(),
            uncalled=("test_entry_point",),
        ),
    )
