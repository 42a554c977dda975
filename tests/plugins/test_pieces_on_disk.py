"""Derived columns of data in pieces on the disk: found again, bounded, and never those of other data.

The classes of errors: a file of other rows, labels or weights is used; a damaged file is used, or all files
are computed again because of it; the disk is filled without need; files stay.
"""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, Trainer, hook
from ortflex_core.training.data import column_files, derived, derived_pieces
from ortflex_plugins.data.npy import NpyFolder
from tests.plugins.test_pieces_once import folder as folder
from tests.plugins.test_pieces_once import inputs_of, shards, trainer
from tests.plugins.test_pieces_once import rows_run as rows_run
from tests.training import same


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.columns")) if folder.exists() else []


def test_memory_and_files_have_the_same_bits(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived_pieces, "STORE", 2000)
    monkeypatch.setattr(derived, "_AT_ONCE", 16)
    source = shards(tmp_path / "data")
    memory, disk = trainer(cache="memory"), trainer()
    for run in (memory, disk):
        run.fit(source)
    same(disk.get_state(), memory.get_state(), 0)
    assert len(files(folder)) > 3
    assert disk.evaluate(source) == memory.evaluate(source)
    del disk, run
    gc.collect()
    assert files(folder) == []


def test_a_continued_run_finds_the_files(
    tmp_path: Path, folder: Path, rows_run: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a killed process; one of the files is damaged, and only its rows are computed again."""
    monkeypatch.setattr(derived_pieces, "STORE", 2000)
    monkeypatch.setattr(derived, "_AT_ONCE", 16)
    source = shards(tmp_path / "data")

    class Killed:
        @hook
        def epoch_end(self, trainer: Trainer, progress: Any) -> None:
            if progress.epoch == 1:
                trainer.save(tmp_path / "run")
                shutil.copytree(folder, tmp_path / "left")

    whole = trainer(callbacks=[Killed()])
    whole.fit(source)
    expected, plugins = whole.get_state(), whole.plugins
    del whole
    gc.collect()
    for damage, computed in ((False, 0), (True, 32)):
        shutil.copytree(tmp_path / "left", folder)
        folder.chmod(0o700)
        if damage:
            path = max(files(folder), key=lambda path: path.stat().st_size)
            content = bytearray(path.read_bytes())
            content[20] ^= 1
            path.write_bytes(content)
        before = sum(rows_run)
        resumed = Trainer.resume(tmp_path / "run", plugins=plugins, callbacks=[])
        resumed.fit(source)
        same(resumed.get_state(), expected, 0)
        assert sum(rows_run) - before == 2 + computed
        del resumed
        gc.collect()
        assert files(folder) == []


def changed(what: str, path: Path) -> tuple[NpyFolder, dict[str, Any]]:
    """The data and the arguments of another training."""
    options: dict[str, Any] = {}
    if what == "rows":
        x = np.load(path / "2" / "X.npy")
        x[-1] += 1
        np.save(path / "2" / "X.npy", x)
    elif what == "labels":
        y = np.load(path / "2" / "y.npy")
        np.save(path / "2" / "y.npy", (y + 1) % 4)
    elif what == "weights":
        options = {"seed": 1}
    elif what == "classes":
        options = {"classes": [3, 2, 1, 0]}
    return NpyFolder(path=str(path), buffer=32), options


@pytest.mark.parametrize("what", ["rows", "labels", "weights", "classes"])
def test_other_data_have_other_files(tmp_path: Path, what: str) -> None:
    source = shards(tmp_path / "data")
    first = trainer()
    first.fit(source)
    source, options = changed(what, tmp_path / "data")
    states = []
    for cache in ("disk", False):
        run = trainer(**options, cache=cache)
        run.fit(source)
        states.append(run.get_state())
    same(*states, 1e-6)
    with pytest.raises(AssertionError):
        same(states[0], first.get_state(), 1e-6)


def test_auto_leaves_half_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = shards(tmp_path / "data")
    monkeypatch.setattr(column_files, "MOST_MEMORY", 1000)
    monkeypatch.setattr(derived, "MOST_MEMORY", 1000)
    usage = type("Usage", (), {"free": 30_000})  # 150 rows of 27 numbers are 16,200 bytes
    with monkeypatch.context() as patch:
        patch.setattr(column_files.shutil, "disk_usage", lambda path: usage)
        run = trainer(cache="auto", progress=None)
        run.fit(source)
        assert inputs_of(run) == ["X"]
        assert "more than half" in capfd.readouterr().err
        asked = trainer(cache="disk")
        asked.fit(source)
        assert inputs_of(asked) == ["f"]
    same(asked.get_state(), run.get_state(), 1e-6)


def test_auto_computes_a_single_epoch_in_its_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    run = trainer(cache="auto", epochs=1, progress=None)
    run.fit(shards(tmp_path / "data"))
    assert inputs_of(run) == ["X"]
    assert "one epoch reads each row once" in capfd.readouterr().err


def test_a_full_disk_leaves_no_file(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shards(tmp_path / "data")
    usage = type("Usage", (), {"free": 10_000})
    with monkeypatch.context() as patch:
        patch.setattr(column_files.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(DataError, match="TMPDIR"):
            trainer().fit(source)
    monkeypatch.setattr(derived_pieces, "STORE", 2000)
    monkeypatch.setattr(derived, "_AT_ONCE", 16)
    allocate, count = column_files._allocate, [0]

    def full(*given: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise OSError(28, "No space left on device")
        allocate(*given)

    monkeypatch.setattr(column_files, "_allocate", full)
    run = trainer()
    with pytest.raises(DataError, match="TMPDIR"):
        run.fit(source)
    del run
    gc.collect()
    assert [path for path in folder.rglob("*") if path.is_file()] == []
