"""Trainings that are killed lose nothing but time; disks that are full or read-only lose no checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ortflex_core import OutputError, Trainer, list_checkpoints
from tests import children, models
from tests.training import make, regression

pytestmark = pytest.mark.per_python


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(("seed", "kills"), [(7, 3), pytest.param(1, 1000, marks=pytest.mark.slow)])
def test_killed_trainings_of_drawn_recipes_end_in_the_same_bits(seed: int, kills: int) -> None:
    """Optimizers, schedules, averages, groups, kinds of data and backends, killed anywhere.

    In a process of its own: its forks must not have the sessions of other tests.
    """
    call = [sys.executable, "-m", "tests.end_to_end.kill_campaign"]
    run = children.run(
        [*call, "--seed", str(seed), "--kills", str(kills)],
        seconds=200 + 5 * kills,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.stdout, run.stderr
    found = json.loads(run.stdout)
    assert found["wrong"] == []
    assert found["counts"]["kills"] >= kills
    assert run.returncode == 0, run.stderr


def content(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """The system writes no more than so many bytes into a file."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def untrained(folder: Path) -> Trainer:
    """A Trainer with one checkpoint."""
    trainer = make(models.mlp(), optimizer="adam")
    trainer.save(folder / "checkpoints" / "step-000000000")
    return trainer


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    whole = untrained(tmp_path)
    before, place = content(tmp_path), list_checkpoints(tmp_path / "checkpoints")[-1]
    sizes = sorted(len(written) for written in before.values())
    whole.fit(*regression(rows=40, features=6))
    for size in (0, sizes[0], sizes[-1]):
        with full_after(size), pytest.raises(OutputError, match=r"cannot write .*: File too large"):
            whole.save(place)
        assert content(tmp_path) == before
    Trainer.resume(place)
    whole.save(place)
    assert content(tmp_path) != before


@pytest.fixture
def nobodys() -> Iterator[Path]:
    """A folder where this process may not write, even if it is the system's administrator."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


@contextmanager
def no_rights() -> Iterator[None]:
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no such users here")
def test_a_read_only_folder_leaves_the_last_checkpoint(nobodys: Path) -> None:
    whole = untrained(nobodys)
    before, place = content(nobodys), list_checkpoints(nobodys / "checkpoints")[-1]
    for folder in (nobodys, nobodys / "checkpoints"):
        folder.chmod(0o555)
    with no_rights(), pytest.raises(OutputError, match=r"Permission denied|cannot be written to"):
        whole.save(place)
    with (
        no_rights(),
        pytest.raises(OutputError, match=r"cannot write the checkpoint .*Permission denied"),
    ):
        whole.save(nobodys / "another" / "place")
    for folder in (nobodys / "checkpoints", nobodys):
        folder.chmod(0o755)
    assert content(nobodys) == before
    Trainer.resume(place)


def test_a_disk_that_does_not_flush_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    whole = untrained(folder)
    before, real = content(folder), os.fsync

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        whole.save(list_checkpoints(folder / "checkpoints")[-1])
    monkeypatch.setattr(os, "fsync", real)
    assert content(folder) == before
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(
        OutputError, match=r"cannot write the checkpoint .*(File exists|Not a directory)"
    ):
        whole.save(blocked / "checkpoint")
