"""The campaign of drawn recipes in several processes: a few in threads, and whole as a slow test."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ortflex_core import ThreadGroup, run_ranks
from tests import children
from tests.end_to_end import distributed_campaign as campaign
from tests.training import usable

STEPS = {"name": "fused", "steps_per_run": 1}


def compare(case: dict[str, Any], size: int, backend: Any) -> None:
    alone = campaign.outcome(case, backend, accumulate=size * case["per_rank"])

    def job(group: ThreadGroup) -> dict[str, str]:
        return campaign.outcome(case, backend, distributed=group, accumulate=case["per_rank"])

    for of_rank in run_ranks(size, job):
        if isinstance(of_rank, BaseException):
            raise of_rank
        assert campaign.differences(case, of_rank, alone) == [], case


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "number"),
    [*(("W1", k) for k in range(6)), *(("W3", k) for k in range(4)), ("W7", 0), ("W8", 2)],
)
def test_drawn_recipes_in_threads(name: str, number: int) -> None:
    compare(campaign.draw(name, number), 2 + number % 2, STEPS)


@pytest.mark.parametrize("number", range(3))
def test_drawn_recipes_on_training_agent(number: int) -> None:
    usable("training_agent")
    compare(campaign.draw("W1", number, simple=True), 2, "training_agent")


def test_three_processes_and_1001_rows() -> None:
    compare(campaign.draw("W1", 7, 1001), 3, STEPS)


def test_the_recipes_have_all_features() -> None:
    """What ten recipes of each workload have together."""
    cases = [campaign.draw(name, k) for name in campaign.NAMES for k in range(10)]
    options = {key for case in cases for key in case["options"]}
    wanted = {
        "penalty",
        "clip_norm",
        "transforms",
        "groups",
        "averaging",
        "constraint",
        "callbacks",
    }
    assert wanted <= options
    assert {"metrics"} <= options
    schedules = {str(case["options"]["schedule"]) for case in cases}
    assert any("plateau" in text for text in schedules)
    for key in ("several", "weights", "norm", "dropout", "masked"):
        assert {case[key] for case in cases} == {True, False}, key
    assert {case["options"]["shuffle"] for case in cases} == {True, False}
    assert all(case["rows"] % campaign.BATCHES[case["name"]] for case in cases)
    assert "class_weight" in str(cases)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", ["torch", "mpi"])
def test_the_campaign(group: str) -> None:
    pytest.importorskip("torch" if group == "torch" else "mpi4py")
    module = "tests.end_to_end.distributed_campaign"
    call = [sys.executable, "-m", module, "--groups", group, "--sizes", "2"]
    children.run(call, seconds=1500, check=True)
