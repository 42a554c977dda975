"""Killed trainings of drawn recipes, by the API and on the command line, end in the same bits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import children

pytestmark = pytest.mark.per_python

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kills"), [(0, 3), (1, 1000)])
def test_killed_trainings_of_drawn_recipes_end_in_the_same_bits(seed: int, kills: int) -> None:
    """Optimizers, schedules, averages, groups, kinds of data and backends, killed anywhere.

    In a process of its own: its forks must not have the sessions of other tests.
    """
    call = [sys.executable, "-m", "tests.end_to_end.kill_campaign"]
    run = children.run(
        [*call, "--seed", str(seed), "--kills", str(kills)],
        seconds=200 + 5 * kills,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.stdout, run.stderr
    found = json.loads(run.stdout)
    print(found["counts"])
    assert found["wrong"] == []
    assert found["counts"]["kills"] >= kills
    assert run.returncode == 0, run.stderr
