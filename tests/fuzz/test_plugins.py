"""Broken plugins of drawn kinds: they concern only those who ask for them."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from tests import children
from tests.fuzz.batch import ROOT
from tests.fuzz.plugins import every, run

pytestmark = pytest.mark.once

COUNT = 200
FEW = 4
FIRST = 0


def check(outcomes: list[dict[str, Any]], count: int) -> None:
    bad = [o for o in outcomes if o["wrong"]]
    shown = "\n\n".join(
        f"seed {o['seed']}: {o['kind']} that {o['how']}: {o['wrong']}" for o in bad[:5]
    )
    assert not bad, f"{len(bad)} of {count}, for example:\n{shown}"
    assert len(outcomes) == count
    assert len({o["kind"] for o in outcomes}) > count / 25


def test_a_few_broken_plugins() -> None:
    check(list(run(FIRST, FEW)), FEW)


@pytest.mark.slow
def test_200_broken_plugins() -> None:
    """Twenty in a process: one that hangs, or ends the process, is noticed."""
    import json

    outcomes = []
    for first in range(FIRST, FIRST + COUNT, 20):
        result = children.run(
            [sys.executable, "-W", "ignore", "-m", "tests.fuzz.plugins", str(first), "20"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            seconds=300,
        )
        assert result.returncode == 0, f"seeds from {first}: {result.stderr[-4000:]}"
        outcomes += [json.loads(line) for line in result.stdout.splitlines()]
    check(outcomes, COUNT)


def test_the_table_has_every_kind_and_no_way_twice() -> None:
    table = [(b.kind, b.how) for b in every()]
    assert len(table) == len(set(table)) > 300
    assert {kind for kind, _ in table} >= {"losses", "backends", "gradients", "ortflex", "data"}
