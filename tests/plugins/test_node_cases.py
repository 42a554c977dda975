"""The standard's node cases: a sample here, all of them among the slow tests.

The class of defects: a rule, a replay or a rewrite that is wrong, or raises what it should not, for a
form of an operator that none of our own cases draws. The cases are the standard's, the numbers those
of its reference evaluator.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from ortflex_core import require_runtime
from ortflex_plugins.cli.reference import FIGURES
from tests import children, node_cases, report
from tests.conftest import Recorder
from tests.node_cases import OUTCOMES, RUNTIME_DIFFERS, Result
from tests.node_oracle import evaluator

pytestmark = pytest.mark.skipif(
    require_runtime().max_opset < 26 or onnx.defs.onnx_opset_version() < 28,
    reason="the cases of the newest onnx are for the newest onnxruntime",
)


def campaign(folder: Path, *arguments: str, seconds: float = 250) -> list[Result]:
    """The results of ``python -m tests.node_cases``, which starts processes of its own."""
    path = folder / "results.json"
    command = [sys.executable, "-m", "tests.node_cases", "--json", str(path), *arguments]
    ended = children.run(command, seconds=seconds)
    assert path.is_file(), ended.stderr
    return [Result(**found) for found in json.loads(path.read_text())]


def bad(results: list[Result]) -> list[str]:
    """What is wrong or crashed, or where the runtime differs and no one knows why."""
    return [
        f"{r.name}: {r.outcome}: {r.message}"
        for r in results
        if r.outcome in ("wrong", "crashed")
        or (r.outcome == "runtime differs" and r.name not in RUNTIME_DIFFERS)
    ]


def test_a_sample_of_the_standards_cases_is_right(tmp_path: Path) -> None:
    results = campaign(tmp_path, "--every", "40", "--seed", "1")
    assert bad(results) == []
    assert sum(r.outcome == "right" for r in results) >= 5


@pytest.mark.slow
def test_all_of_the_standards_cases_are_right(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Also that docs/reference shows what comes out; ``make test-all`` prints the table."""
    results = campaign(tmp_path, seconds=7000)
    record_property(
        "table", "The standard's node cases\n" + node_cases.table(node_cases.by_operator(results))
    )
    assert bad(results) == []
    assert node_cases.stale(results) == [], "run python -m tests.node_cases --write"


@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_the_table_is_printed_at_the_end(
    outcome: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``make test-all`` does it, from whichever process ran the test, and above all if it failed."""
    recorder = Recorder(tmp_path / "stock.json")
    place, said = ("a.py", 1, "a"), [("table", "The cases\nall 3")]
    recorder.pytest_runtest_logreport(
        pytest.TestReport("a", place, {}, outcome, None, "call", user_properties=said)
    )
    recorder.pytest_sessionfinish()
    assert report.main(tmp_path) == (outcome == "failed")
    assert capsys.readouterr().out.count("The cases\nall 3\n") == 1


def test_what_is_wrong_or_new_is_not_passed_over() -> None:
    known = next(iter(RUNTIME_DIFFERS))
    outcomes = [("a", o) for o in OUTCOMES] + [(known, "runtime differs"), (known, "wrong")]
    found = bad([Result(name, "Add", outcome) for name, outcome in outcomes])
    wrong = ["a: wrong: ", "a: runtime differs: ", "a: crashed: ", f"{known}: wrong: "]
    assert found == wrong


def test_the_figures_that_are_checked_in_have_nothing_wrong() -> None:
    known = node_cases.written()
    assert node_cases.text_of(known) == (node_cases.FOLDER / FIGURES).read_text(encoding="utf-8")
    total: Counter[str] = Counter()
    for counts in known["operators"].values():
        total.update(counts)
    assert not {"wrong", "crashed"} & set(total)
    assert total["right"] >= 1100
    told = Counter(outcome for _, outcome, _, count in known["reasons"] for _ in range(count))
    assert told == {o: total[o] for o in ("refused", "runtime differs")}


def test_another_count_or_reason_makes_the_figures_stale() -> None:
    """The class: the page still shows what was true once."""
    results = [Result("a", "Add", "right"), Result("b", "Add", "refused", "Unsupported: no kernel")]
    line, reason = '"Add": {"right": 1, "refused": 1}', '["Add", "refused", "no kernel", 1]'
    changes = node_cases.stale(results)
    assert f"+ {line},"[:-1] in changes
    assert f"+ {reason}" in changes
    assert any(change.startswith('- "Abs"') for change in changes)


@pytest.mark.parametrize(
    ("message", "short"),
    [
        (
            "by the runtime (the plain model, too), right in the reference: NotImplemented: "
            "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for "
            "Mul(14) node with name 'x'",
            "onnxruntime has no kernel for Mul with these data types",
        ),
        (
            "NoGradientRule: no gradient rule for the operator STFT with a step that is not "
            "constant of ai.onnx opset 17, node STFT, reached by x -> STFT. Freeze the rest.",
            "no gradient rule for STFT with a step that is not constant",
        ),
        ("ModelError: the input 'x' is an optional. Do this.", "the input 'x' is an optional"),
    ],
)
def test_reasons_without_the_place_and_the_advice(message: str, short: str) -> None:
    made = node_cases.figures([Result("a", "Add", "refused", message)])
    assert made["reasons"] == [["Add", "refused", short, 1]]


def test_onnxs_own_evaluator_has_no_absolute_values_in_lp_normalization() -> None:
    """The proof that the oracle has to have its own: ‖(−1, 3)‖₁ is 4, not 2."""
    text = '<ir_version: 8, opset_import: ["": 22]> g (double[2] x) => (double[2] y)'
    model = onnx.parser.parse_model(f"{text} {{ y = LpNormalization<axis = 0, p = 1>(x) }}")
    x = {"x": np.array([-1.0, 3.0])}
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, x)[0], [-0.5, 1.5])
    np.testing.assert_array_equal(evaluator(model).run(None, x)[0], [-0.25, 0.75])
