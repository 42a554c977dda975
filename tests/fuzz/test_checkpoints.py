"""Attacks on checkpoints: damage by the disk, several writers at once, processes that are killed.

    python -m tests.fuzz.test_checkpoints FOLDER SEED COUNT

damages COUNT times and prints what came of it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from ortflex_core import require_runtime
from tests.fuzz import damage, writers

pytestmark = pytest.mark.once

ALL = os.environ.get("ORTFLEX_TEST_SAMPLE", "1") == "1"
SEED = 10

plain = pytest.mark.skipif(
    require_runtime().has_training_agent, reason="once is enough, on the plain runtime"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


def damaged(folder: Path, seed: int, count: int) -> Counter[str]:
    """``count`` attacks, spread over several checkpoints."""
    places = damage.write(folder)
    out: Counter[str] = Counter()
    for place in places:
        out += damage.attack(place, seed, count // len(places))
    return out


@plain
@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damage_is_noticed_or_harmless(count: int, tmp_path: Path) -> None:
    """Every file, every region of it: an error that names the checkpoint, or the same training."""
    out = damaged(tmp_path, SEED, count)
    bad = {what: n for what, n in out.items() if what.split()[0] not in ("noticed", "harmless")}
    assert not bad
    assert sum(out.values()) == count
    noticed = sum(n for what, n in out.items() if what.startswith("noticed"))
    assert noticed > 0.9 * count  # and the attack does damage
    files = {"checkpoint.json", "state.safetensors", "model.onnx"}
    assert {what.split()[2] for what in out} == files


@plain
@linux
@pytest.mark.parametrize("in_one_step", [True, False])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rounds", [5, pytest.param(500, marks=pytest.mark.slow)])
def test_simultaneous_writers_leave_one_whole_checkpoint(
    rounds: int, count: int, in_one_step: bool, tmp_path: Path
) -> None:
    """It is one of theirs, nothing else is left, no writer fails, and a reader is never lost."""
    problems, reads = writers.attacked(
        "race", tmp_path / "c", count, rounds, in_one_step=in_one_step
    )
    assert not problems
    assert reads


@plain
@linux
@pytest.mark.parametrize("in_one_step", [True, False])
@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_process_killed_while_it_replaces_a_checkpoint_loses_none(
    count: int, in_one_step: bool, tmp_path: Path
) -> None:
    problems, killed = writers.attacked(
        "kill", tmp_path / "c", SEED, count, in_one_step=in_one_step
    )
    if not in_one_step:  # the next save clears it
        problems = [p for p in problems if p != "left over: c.previous"]
    assert not problems
    assert killed == count


if __name__ == "__main__":
    where, first, times = sys.argv[1:]
    for line, number in sorted(damaged(Path(where), int(first), int(times)).items()):
        print(number, line)
