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

from ortflex_core import DataError, Trainer, hook, run_ranks
from ortflex_core.training.data import column_files, derived, derived_pieces
from ortflex_plugins.data.npy import NpyFolder
from tests import models
from tests.plugins.test_pieces_once import folder as folder
from tests.plugins.test_pieces_once import inputs_of, shards, trainer
from tests.plugins.test_pieces_once import rows_run as rows_run
from tests.training import results, same


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
        options = {"model": models.conv_net(side=8, seed=1)}
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


def free(patch: pytest.MonkeyPatch, room: int) -> None:
    """A disk with that many free bytes, on which "auto" keeps all columns."""
    usage = type("Usage", (), {"free": room})
    patch.setattr(column_files.shutil, "disk_usage", lambda path: usage)
    patch.setattr(column_files, "MOST_MEMORY", 1000)
    patch.setattr(derived, "MOST_MEMORY", 1000)


def test_auto_leaves_half_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = shards(tmp_path / "data")
    with monkeypatch.context() as patch:
        free(patch, 30_000)  # 150 rows of 27 numbers are 16,200 bytes
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


def test_labels_of_a_loss_that_ignores_some_are_not_those_of_another(tmp_path: Path) -> None:
    """The labels are checked again, although the columns of the first run are there."""
    source = shards(tmp_path / "data")
    y = np.load(tmp_path / "data" / "1" / "y.npy")
    y[5] = -1
    np.save(tmp_path / "data" / "1" / "y.npy", y)
    first = trainer(loss={"name": "softmax_cross_entropy", "ignore_index": -1})
    first.fit(source)
    with pytest.raises(DataError, match="labels must be at least 0"):
        trainer().fit(source)


def test_files_of_a_run_that_ends_now_are_computed_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run removes its files after they have been compared with their digests."""
    source = shards(tmp_path / "data")
    first = trainer()
    first.fit(source)
    mapped = column_files._mapped

    def removed(path: Path, layout: Any, mode: Any) -> Any:
        if mode == "r":
            path.unlink()
        return mapped(path, layout, mode)

    monkeypatch.setattr(column_files, "_mapped", removed)
    second = trainer()
    second.fit(source)
    same(second.get_state(), first.get_state(), 0)


def test_auto_counts_the_files_of_the_same_rows_only(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a killed run are room for the run that continues it, not for another one."""
    source = shards(tmp_path / "data")
    before = trainer()
    before.fit(source)
    assert inputs_of(before) == ["f"]
    other = shards(tmp_path / "other", seed=7)
    free(monkeypatch, 18_000)  # 150 rows of 27 numbers and a label are 17,400 bytes
    for data, columns in ((other, ["X"]), (source, ["f"])):
        run = trainer(cache="auto")
        run.fit(data)
        assert inputs_of(run) == columns


def test_auto_reads_validation_rows_again_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training rows have room, the validation rows would take more than half of the disk."""
    source = shards(tmp_path / "data")
    held = shards(tmp_path / "held", 600, 9)
    plain = trainer(cache=False, accumulate=2)
    plain.fit(source, validation_data=held)
    free(monkeypatch, 60_000)

    def train(group: Any) -> Trainer:
        run = trainer(cache="auto", distributed=group)
        run.fit(source, validation_data=held)
        return run

    alone = trainer(cache="auto", accumulate=2)
    alone.fit(source, validation_data=held)
    for run in (alone, *results(run_ranks(2, train))):
        assert inputs_of(run) == ["f"]
        same(run.get_state(), plain.get_state(), 1e-6)
        np.testing.assert_allclose(run.validation_losses_, plain.validation_losses_, rtol=1e-6)
    with pytest.raises(DataError, match="TMPDIR"):
        trainer(cache="disk").fit(source, validation_data=held)
