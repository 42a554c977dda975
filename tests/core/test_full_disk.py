"""A disk that gets full: what was trained is still there, and the error says how to keep it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ortflex_core import OutputError, Trainer, hook, internals_of
from tests import models
from tests.training import make, plugins, regression, same

pytestmark = pytest.mark.once

resource = pytest.importorskip("resource")
X, Y = regression(rows=40, features=6)


def trainer(*callbacks: Any) -> Trainer:
    backend = {"name": "fused", "steps_per_run": 1}
    options: dict[str, Any] = {"backend": backend, "optimizer": "adam", "batch_size": 8}
    return make(models.mlp(), epochs=4, callbacks=list(callbacks), **options)


@contextmanager
def full() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Fill:
    """The disk gets full at a step, or at an epoch's start."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @hook
    def step_end(self, progress: Any) -> None:
        if progress.step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, self.limits[1]))

    def empty(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)


@pytest.mark.parametrize("step", [3, 5, 12, 20])
@pytest.mark.parametrize(
    "settings", [{"steps": 1}, {"epochs": 1}, {"minutes": 60.0, "best": False}]
)
def test_an_unwritable_checkpoint(step: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """In the middle of an epoch, at its end, and at the end of all: saved elsewhere, it continues."""
    whole = trainer()
    whole.fit(X, Y)
    place, fill = {"name": "checkpoint", "folder": str(tmp_path / "ck"), **settings}, Fill(step)
    one = trainer(place, fill)
    try:
        with pytest.raises(OutputError, match="File too large") as caught:
            one.fit(X, Y)
    finally:
        fill.empty()
    assert str(caught.value).count("cannot write") == 1
    assert ".." not in str(caught.value).replace("...", "")
    assert sum("trainer.save(another_folder)" in note for note in caught.value.__notes__) == 1
    now = internals_of(one).live.standing.manual
    assert len(one.history_) == now.epoch
    one.export(tmp_path / "trained.onnx")
    one.save(tmp_path / "elsewhere")
    again = Trainer.resume(tmp_path / "elsewhere", plugins=plugins(), callbacks=[])
    if now.step < 20:
        again.fit(X, Y)
    same(again.get_state(), whole.get_state(), 0)


def test_a_log_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill = Fill(7)
    one = trainer({"name": "csv_log", "path": str(tmp_path / "log.csv")}, fill)
    try:
        with caplog.at_level(logging.WARNING):
            history = one.fit(X, Y)
    finally:
        fill.empty()
    assert len(history) == 4
    warnings = [r.getMessage() for r in caplog.records if "File too large" in r.getMessage()]
    assert [text[:16] for text in warnings] == [f"csv_log, epoch {k}:"[:16] for k in (2, 3, 4)]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["checkpoint", "csv_log"])
def test_a_folder_that_cannot_be_created_is_an_early_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    key = {"checkpoint": "folder", "csv_log": "path"}[name]
    one = trainer({"name": name, key: str(tmp_path / "file" / "x" / "y")})
    before = one.get_state()
    with pytest.raises(OutputError, match="cannot create the folder"):
        one.fit(X, Y)
    same(one.get_state(), before, 0)


def test_an_export_that_cannot_be_written_leaves_the_trainer_as_it_is(tmp_path: Path) -> None:
    one = trainer()
    one.fit(X, Y)
    with full(), pytest.raises(OutputError, match="File too large") as caught:
        one.export(tmp_path / "out.onnx")
    assert str(caught.value).count("cannot write") == 1
    assert os.listdir(tmp_path) == []
    one.export(tmp_path / "out.onnx")
