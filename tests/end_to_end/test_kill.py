"""Processes that are killed in the middle of a training with checkpoints lose nothing but time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ortflex_core import Trainer
from ortflex_core.checkpoint import numbered
from ortflex_core.files import OutputError
from ortflex_core.runtime import require_runtime
from tests import models
from tests.training import make, regression

# Where every environment runs all of a table, this one does too; elsewhere a few will do.
KILLS = 20 if os.environ.get("ORTFLEX_TEST_SAMPLE", "1") == "1" else 4
ROOT = Path(__file__).parents[2]
WORKER = """
import sys
from pathlib import Path
from tests.end_to_end.test_kill import trained
trained(Path(sys.argv[1]))
(Path(sys.argv[1]) / "done").touch()
"""


def trained(folder: Path) -> Trainer:
    """Start, or go on with, a training that writes a checkpoint every few steps."""
    x, y = regression(rows=200, features=6)
    place = folder / "checkpoints"
    options = {"name": "checkpoint", "folder": str(place), "steps": 3, "keep": 2, "best": False}
    if numbered(place):
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
    before = [p.name for p in numbered(folder / "checkpoints")]
    # The clock starts when the training does: imports take longer than it.
    while process.poll() is None and time.monotonic() - began < 60:
        if [p.name for p in numbered(folder / "checkpoints")] != before:
            break
        time.sleep(0.002)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return not (folder / "done").exists()


def killed_until(kills: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(int(kills))
    whole = trained(tmp_path / "whole")
    wanted = {**whole.get_state(averaged=True), **whole.engine.slots()}
    count = 0
    for attempt in range(10 * kills):
        folder = tmp_path / str(attempt)
        while kill(folder, float(rng.uniform(0, 0.5))):
            count += 1
        again = trained(folder)  # nothing is left to do, or nothing but the end of it
        got = {**again.get_state(averaged=True), **again.engine.slots()}
        for name, array in wanted.items():
            assert got[name].tobytes() == array.tobytes(), name
        if count >= kills:
            return
    raise AssertionError(f"only {count} of {kills} trainings were killed")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.skipif(
    require_runtime().has_training_agent, reason="once is enough, on the plain runtime"
)
@pytest.mark.parametrize("kills", [KILLS, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_trainings_end_in_the_same_bits(kills: int, tmp_path: Path) -> None:
    killed_until(kills, tmp_path)


def test_a_folder_that_cannot_be_written_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    whole = trained(folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    real = os.fsync

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        whole.save(numbered(folder / "checkpoints")[-1])
    monkeypatch.setattr(os, "fsync", real)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(OutputError, match="cannot create the folder"):
        whole.save(blocked / "checkpoint")
