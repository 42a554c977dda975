"""Attacks on checkpoints: damage by the disk, several writers at once, processes that are killed.

    python -m tests.fuzz.test_checkpoints FOLDER SEED COUNT

damages COUNT times and prints what came of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest

from ortflex_core import CheckpointError, Trainer, hook, require_runtime
from ortflex_core.training.artifacts import checkpoint
from ortflex_core.training.artifacts.checkpoint import Checkpoint
from tests import models
from tests.fuzz import writers
from tests.training import make, regression

pytestmark = pytest.mark.once

WAYS = ("flip", "flip", "flip", "flip", "truncate", "zeros")


class _Once:
    """Saves in the middle of an epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @hook
    def settled(self, trainer: Trainer, progress: Any) -> None:
        if progress.epoch == 1:
            trainer.save(self.folder)


def kinds(folder: Path) -> list[Path]:
    """Checkpoints of several kinds: in mid-training, with arrays of callbacks, of nothing trained."""
    x, y = regression(rows=24, features=3)
    options: dict[str, Any] = {
        "backend": "fused",
        "optimizer": "adam",
        "batch_size": 4,
        "epochs": 3,
    }
    stopping = {"name": "early_stopping", "monitor": "loss"}
    for name, more in {
        "middle": {"callbacks": [_Once(folder / "middle")]},
        "best": {"callbacks": [stopping], "averaging": "ema"},
        "frozen": {"params": ["W2", "b2"], "schedule": "cosine"},
    }.items():
        trainer = make(models.mlp((3, 4, 1)), **{**options, **more})
        trainer.fit(x, y)
        if name != "middle":
            trainer.save(folder / name)
    make(models.mlp((3, 4, 1)), **options).save(folder / "untrained")
    return sorted(folder.iterdir())


def attack(place: Path, seed: int, count: int) -> Counter[str]:
    """Damage one file at a time and read; what came of it, by way and file.

    What is read in spite of the damage has to be what was written, to the bit.
    """
    rng = Random(f"{place.name}/{seed}")
    files = sorted(p for p in place.rglob("*") if p.is_file())
    wanted = content(checkpoint.read(place))
    out: Counter[str] = Counter()
    for _ in range(count):
        path = rng.choice(files)
        whole = path.read_bytes()
        way, broken = one_way(rng, whole)
        path.write_bytes(broken)
        try:
            end = "harmless" if content(checkpoint.read(place)) == wanted else "WRONG"
        except CheckpointError as error:
            end = "noticed" if str(place) in str(error) else "NAMELESS"
        finally:
            path.write_bytes(whole)
        out[f"{end} {way} {path.name}"] += 1
    return out


def one_way(rng: Random, whole: bytes) -> tuple[str, bytes]:
    """A way, and the bytes that it leaves; they are never the whole ones."""
    while True:
        way, at = rng.choice(WAYS), rng.randrange(len(whole))
        if way == "flip":
            broken = bytearray(whole)
            broken[at] ^= 1 << rng.randrange(8)
            return way, bytes(broken)
        broken = whole[:at] + (b"" if way == "truncate" else bytes(len(whole) - at))
        if broken != whole:
            return way, bytes(broken)


def content(found: Checkpoint) -> dict[str, Any]:
    """All that is used of a checkpoint, comparable."""
    arrays = {n: (str(a.dtype), a.shape, a.tobytes()) for n, a in found.arrays.items()}
    files = {p.name: p.read_bytes() for p in _model_files(found)}
    return {"record": repr(attrs.asdict(found.record)), "arrays": arrays, "model": files}


def _model_files(found: Checkpoint) -> Iterator[Path]:
    yield from sorted(found.model.parent.iterdir())


SEED = 10

plain = pytest.mark.skipif(
    require_runtime().has_training_agent, reason="once is enough, on the plain runtime"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


def damaged(folder: Path, seed: int, count: int) -> Counter[str]:
    """``count`` attacks, spread over several checkpoints."""
    places = kinds(folder)
    out: Counter[str] = Counter()
    for place in places:
        out += attack(place, seed, count // len(places))
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
