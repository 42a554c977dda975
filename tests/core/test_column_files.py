"""Derived columns on the disk: bounded, complete or absent, found again, and removed.

The classes of errors: columns that another process wrote in part are used, columns of other data or
other weights are used, a file stays, or a full disk ends the process.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ortflex_core import DataError, Trainer
from ortflex_core.kernel.files import OutputError
from ortflex_core.training.data import column_files, derived
from ortflex_core.training.data.prefix_session import PrefixSession
from tests.core import test_derived_columns as columns
from tests.core.test_derived_columns import X, Y, images
from tests.core.test_derived_columns import rows_run as rows_run
from tests.training import same


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files."""
    monkeypatch.setattr(column_files.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"ortflex-columns-{os.getuid()}"


def trainer(seed: int = 0, **options: Any) -> Trainer:
    return columns.trainer(seed, **{"backend": "fused", "cache": "disk"} | options)


def files(folder: Path) -> list[Path]:
    """The complete files."""
    return sorted(folder.glob("*.columns")) if folder.exists() else []


@pytest.fixture
def computed(rows_run: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every run of a prefix, except those of its test."""
    monkeypatch.setattr(derived.Derivation, "probe", lambda *given: {})
    return rows_run


def test_a_file_leaves_the_bits_of_memory_and_is_removed(folder: Path) -> None:
    memory, disk = trainer(cache="memory"), trainer()
    for run in (memory, disk):
        run.fit(X, Y, validation_data=(X[:10], Y[:10]))
    same(disk.get_state(), memory.get_state(), 0)
    assert disk.validation_losses_ == memory.validation_losses_
    assert len(files(folder)) == 2
    assert folder.stat().st_mode & 0o077 == 0
    del disk, run
    gc.collect()
    assert files(folder) == []
    assert not folder.exists()


def test_auto_takes_a_file_for_large_columns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = trainer(cache="auto")
    small.fit(X, Y)
    assert not folder.exists()
    monkeypatch.setattr(derived, "MOST_MEMORY", 1000)
    large = trainer(cache="auto")
    large.fit(X, Y)
    assert len(files(folder)) == 1
    same(large.get_state(), small.get_state(), 0)


def test_a_resumed_run_finds_the_columns(folder: Path, tmp_path: Path, computed: list[int]) -> None:

    def epoch_end(trainer: Trainer, progress: Any) -> None:
        if progress.epoch == 1:
            trainer.save(tmp_path / "run")
            shutil.copytree(folder, tmp_path / "left")

    whole = trainer(callbacks=[epoch_end])
    whole.fit(X, Y)
    expected = whole.get_state()
    plugins = whole.plugins
    del whole
    gc.collect()
    shutil.copytree(tmp_path / "left", folder)
    folder.chmod(0o700)
    before = sum(computed)
    resumed = Trainer.resume(tmp_path / "run", plugins=plugins, callbacks=[])
    resumed.fit(X, Y)
    same(resumed.get_state(), expected, 0)
    assert sum(computed) - before == 2  # which tell the types
    del resumed
    gc.collect()
    assert files(folder) == []


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "link"])
def test_a_damaged_file_is_computed_again(
    folder: Path, tmp_path: Path, damage: str, computed: list[int]
) -> None:
    first = trainer()
    first.fit(X, Y)
    [path] = files(folder)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[100] ^= 1
    if damage == "link":
        (tmp_path / "target").write_bytes(content)
        path.unlink()
        os.mkfifo(path)
    else:
        end = {"short": -1, "flipped": len(content), "long": len(content)}[damage]
        path.write_bytes(bytes(content[:end]) + b"x" * (damage == "long"))
    before = sum(computed)
    second = trainer()
    second.fit(X, Y)
    assert sum(computed) - before >= 30
    same(second.get_state(), first.get_state(), 0)


def test_other_rows_and_other_weights_have_other_files(folder: Path) -> None:
    changed = X.copy()
    changed[29, 0, 7, 7] += 1
    runs = [trainer(), trainer(), trainer(seed=1)]
    for run, rows in zip(runs, (X, changed, X), strict=True):
        run.fit(rows, Y)
    assert len(files(folder)) == 3


def test_a_full_disk_is_an_early_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = mock.Mock(return_value=mock.Mock(free=100))
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    for module, name, answer in (
        (column_files.shutil, "disk_usage", usage),
        (column_files.os, "posix_fallocate", full),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, answer)
            with pytest.raises(DataError, match="TMPDIR"):
                trainer().fit(X, Y)
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_an_error_in_between_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PrefixSession.__call__
    rows = [0]

    def failing(session: PrefixSession, inputs: Any) -> Any:
        rows[0] += len(next(iter(inputs.values())))
        if rows[0] > 2100:
            raise KeyboardInterrupt
        return run(session, inputs)

    monkeypatch.setattr(PrefixSession, "__call__", failing)
    with pytest.raises(KeyboardInterrupt):
        trainer().fit(*images(5000))
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(OutputError, match="TMPDIR"):
        trainer().fit(X, Y)


def test_old_files_of_killed_processes_are_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for name, age in (("old", 8), ("new", 1)):
        path = folder / f"{name}.columns"
        path.write_bytes(b"")
        past = path.stat().st_mtime - age * 24 * 3600
        os.utime(path, (past, past))
    run = trainer()
    run.fit(X, Y)
    assert {path.stem for path in files(folder)} & {"new", "old"} == {"new"}


OCCUPIED: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"x"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to a folder": lambda path: path.symlink_to(path.parent),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", ["folder", "filled folder", *OCCUPIED])
def test_something_else_is_in_its_place(kind: str, folder: Path, computed: list[int]) -> None:
    """It is replaced; a folder is refused before the rows are computed, and kept."""
    first = trainer()
    first.fit(X, Y)
    (path,) = files(folder)
    wanted = first.get_state()
    path.unlink()
    before = sum(computed)
    if kind in OCCUPIED:
        OCCUPIED[kind](path)
        again = trainer()
        again.fit(X, Y)
        same(again.get_state(), wanted, 0)
        return
    path.mkdir()
    if kind == "filled folder":
        (path / "mine").write_text("x")
    with pytest.raises(OutputError, match=r"is a folder, where the file .* remove it, set TMPDIR"):
        trainer().fit(X, Y)
    assert sum(computed) - before <= 8  # a few rows give the types
    assert path.is_dir()
    path.rename(folder / "elsewhere")
    trainer().fit(X, Y)
