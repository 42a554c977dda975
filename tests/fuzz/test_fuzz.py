"""Whatever is in a file, ortflex answers with success or an error of its own.

No crash of the process, no more than 10 s of the processor for a file, no more than 1 GiB. What was
found this way is kept in tests/core/test_hostile_files.py and tests/plugins/test_hostile_*.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import children
from tests.fuzz import batch
from tests.fuzz.mutants import KINDS

COUNT = int(os.environ.get("ORTFLEX_MUTANTS", "100000"))
"""Mutants of all kinds together, in the slow tests; the others draw one in 250 of them."""
PERCENT = {
    "model": 34,
    "checkpoint": 13,
    "recipe": 9,
    "data": 19,
    "run": 5,
    "number": 8,
    "step": 6,
    "adapter": 6,
}
ALL = os.environ.get("ORTFLEX_TEST_SAMPLE", "1") == "1"
FIRST = int(os.environ.get("ORTFLEX_MUTANTS_FIRST", "1000000"))
"""The seed: mutants are numbered. Those below were looked at while this was written."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and time")


def check(kind: str, first: int, count: int) -> None:
    outcomes = list(batch.run(kind, first, count))
    bad = [o for o in outcomes if batch.wrong(o)]
    shown = "\n\n".join(
        f"{kind} {o['end']} ({o['of']}): {o['outcome']}, {o['what']}, {o['mib']} MiB\n{o['text']}"
        for o in bad[:5]
    )
    assert not bad, f"{len(bad)} of {count}, for example:\n{shown}"
    assert len(outcomes) == count
    print(kind, batch.summary(outcomes))
    # Mutants that never pass the first check would find nothing.
    assert sum(o["outcome"] == "fine" for o in outcomes) > count / 50


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_mutants(kind: str) -> None:
    check(kind, 0, COUNT * PERCENT[kind] // 25_000)


@pytest.mark.skipif(ALL, reason="these are among those of all kinds")
def test_a_few_models() -> None:
    """The kind that ends processes on some runtimes only."""
    check("model", 0, COUNT * PERCENT["model"] // 100_000)


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="all of them once, in the environment that runs all of a table")
@pytest.mark.parametrize("kind", KINDS)
def test_100_000_mutants(kind: str) -> None:
    check(kind, FIRST, COUNT * PERCENT[kind] // 100)


@pytest.mark.slow
@pytest.mark.skipif(ALL, reason="these are among the 100,000")
def test_models_on_other_runtimes() -> None:
    """Older runtimes end the process over graphs that newer ones refuse."""
    check("model", FIRST, 3000)


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="once is enough")
def test_mutants_guided_by_the_lines_they_reach(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    result = children.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "tests.fuzz.guided", str(tmp_path / "corpus")),
            *("-runs=20000", f"-artifact_prefix={tmp_path}/"),
        ],
        cwd=batch.ROOT,
        seconds=1200,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "Done 20000 runs" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="once is enough")
def test_what_ends_a_process_or_takes_too_long_is_noticed() -> None:
    """The harness itself, on targets that do what must not happen."""
    found = {o["end"]: o for o in batch.run("planted", 0, 6)}
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    assert found[0]["outcome"] == "fine"
    assert (found[1]["outcome"], found[1]["what"]) == ("wrong", "ZeroDivisionError")
    assert (found[2]["outcome"], found[2]["what"]) == ("lost", "died with -6")
    assert found[3]["outcome"] == "wrong"
    assert found[3]["what"] == "MemoryError"
    assert found[4]["outcome"] == "refused"
    assert (found[5]["outcome"], found[5]["what"]) == ("lost", "takes too long")
    assert [batch.wrong(found[k]) for k in range(6)] == [False, True, True, True, False, True]
