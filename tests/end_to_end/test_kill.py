"""Processes that are killed in the middle of a training with checkpoints lose nothing but time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ortflex_core import OutputError, Trainer, list_checkpoints
from tests import models
from tests.training import make, regression

pytestmark = pytest.mark.per_python

ROOT = Path(__file__).parents[2]
WORKER = """
import sys
from pathlib import Path
from tests.end_to_end.test_kill import trained
trained(Path(sys.argv[1]))
(Path(sys.argv[1]) / "done").touch()
"""


def trained(folder: Path) -> Trainer:
    """Start, or continue, a training that writes a checkpoint every few steps."""
    x, y = regression(rows=200, features=6)
    place = folder / "checkpoints"
    options = {"name": "checkpoint", "folder": str(place), "steps": 3, "keep": 2, "best": False}
    if list_checkpoints(place):
        trainer = Trainer.resume(place)
    else:
        trainer = make(
            models.mlp(),
            backend={"name": "fused", "steps_per_run": 3},
            optimizer="adam",
            averaging="ema",
            batch_size=4,
            epochs=6,
            callbacks=[options],
        )
    trainer.fit(x, y)
    return trainer


def kill(folder: Path, seconds: float) -> bool:
    """Run the worker and kill it after so many seconds; False if it had finished before."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    began = time.monotonic()
    before = [p.name for p in list_checkpoints(folder / "checkpoints")]
    # The clock starts when the training does: imports take longer than it.
    while process.poll() is None and time.monotonic() - began < 60:
        if [p.name for p in list_checkpoints(folder / "checkpoints")] != before:
            break
        time.sleep(0.002)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    return not (folder / "done").exists()


def killed_until(kills: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(int(kills))
    whole = trained(tmp_path / "whole")
    wanted = {**whole.get_state(averaged=True), **whole.engine.slots()}
    count = 0
    for attempt in range(10 * kills):
        folder = tmp_path / str(attempt)
        # Where the machine is busy, every process comes a step further only: then the last one ends.
        while count < kills and kill(folder, float(rng.uniform(0, 0.5))):
            count += 1
        again = trained(folder)  # what is left to do, if anything
        got = {**again.get_state(averaged=True), **again.engine.slots()}
        for name, array in wanted.items():
            assert got[name].tobytes() == array.tobytes(), name
        if count >= kills:
            return
    raise AssertionError(f"only {count} of {kills} trainings were killed")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_trainings_end_in_the_same_bits(kills: int, tmp_path: Path) -> None:
    killed_until(kills, tmp_path)


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
