"""Every operator of the standard has a rule, no gradient by its nature, or a reason to have none."""

from __future__ import annotations

from collections import Counter

import pytest

from ortflex_plugins.cli.operators import (
    NEWEST,
    OLDEST,
    WITHOUT_RULE,
    kind,
    operators_markdown,
    standard,
)
from tests.training import plugins


def test_142_of_the_144_differentiable_operators_can_be_trained_through() -> None:
    rules = plugins().rules()
    kinds = {name: kind(rules, name) for name in standard()}
    counts = Counter(kinds.values())
    if not {"BitCast", "CumProd"} <= set(kinds):
        pytest.skip(f"this onnx does not know opset {NEWEST}")
    assert {n for n, found in kinds.items() if found == "no rule"} == set(WITHOUT_RULE)
    assert len(kinds) - counts["not differentiable"] == 144
    assert counts["rule"] + counts["resolved"] == 142


@pytest.mark.parametrize("opset", range(OLDEST, NEWEST + 1))
def test_no_opset_has_an_operator_that_nobody_sorted(opset: int) -> None:
    rules = plugins().rules()
    unsorted = {n for n in standard(opset) if kind(rules, n, opset) == "no rule"}
    assert unsorted <= set(WITHOUT_RULE)


def test_operators_outside_the_standard_are_unknown_until_somebody_brings_a_rule() -> None:
    assert plugins().rules().lookup("com.microsoft", "FusedMatMul", 1) == (False, None)


def test_the_page_has_every_operator() -> None:
    page = operators_markdown(plugins())
    missing = [n for n in standard() if f"| {n} |" not in page and n not in page]
    assert missing == []
    assert "| Gemm |  | matmul | yes | yes |" in page
    assert "- DeformConv: " in page
