"""Every operator of the standard has a rule, is resolved before, or has no gradient by its nature."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from ortflex_core import load_rules
from ortflex_plugins import gradients
from ortflex_plugins.cli.operators import (
    NEWEST,
    OLDEST,
    kind,
    operator_blocks,
    standard,
)
from tests.training import plugins

pytestmark = pytest.mark.once


def test_the_package_of_rules_lists_every_family() -> None:
    families = {entry.name for entry in plugins()["gradients"] if entry.owner == "ortflex"}
    listed = set(re.findall(r"``(\w+)``", str(gradients.__doc__)))
    assert len(families) > 10
    assert families - listed == set()


def test_all_differentiable_operators_can_be_trained_through() -> None:
    """144 that have a derivative, and two products of whole numbers, straight through."""
    rules = load_rules(plugins())
    kinds = {name: kind(rules, name) for name in standard()}
    counts = Counter(kinds.values())
    if not {"BitCast", "CumProd"} <= set(kinds):
        pytest.skip(f"this onnx does not know opset {NEWEST}")
    assert {n for n, found in kinds.items() if found == "no rule"} == set()
    assert counts["rule"] + counts["resolved"] == 144 + 2
    assert counts["decomposed"] == 2


@pytest.mark.parametrize("opset", range(OLDEST, NEWEST + 1))
def test_every_operator_of_every_opset_has_a_rule_or_a_reason(opset: int) -> None:
    rules = load_rules(plugins())
    assert [n for n in standard(opset) if kind(rules, n, opset) == "no rule"] == []


def test_operators_outside_the_standard_are_unknown_without_a_plugin() -> None:
    assert load_rules(plugins()).lookup("com.microsoft", "FusedMatMul", 1) == (False, None)


def test_the_page_has_every_operator() -> None:
    page = "\n\n".join(operator_blocks(plugins(), None))
    missing = [n for n in standard() if f"| {n} |" not in page and n not in page]
    assert missing == []
    assert "| Gemm |  | matmul | yes |" in page
    assert "no rule is missing" in page
    assert "## Operators without a rule" not in page
