"""The callbacks: what they write, when they stop, and that a resumed training continues with them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import ConfigError, Trainer, list_checkpoints
from tests import models
from tests.training import EndAt, Recorder, every_backend, make, plugins, regression, same


def overfitting(rows: int = 24) -> Any:
    """Few noisy rows and a held-out set: the validation loss falls, then rises."""
    x, y = regression(rows=rows, features=6, seed=4)
    rng = np.random.default_rng(0)
    return x, y + rng.standard_normal(y.shape).astype(np.float32), *regression(40, 6, seed=4)


@every_backend
def test_early_stopping_goes_back_to_the_best_epoch(backend: str) -> None:
    x, y, held_x, held_y = overfitting()
    options: dict[str, Any] = {"learning_rate": 0.1, "epochs": 200, "batch_size": 8}
    stopping = {"name": "early_stopping", "patience": 4}
    trainer = make(models.mlp(), callbacks=[stopping], backend=backend, **options)
    history = trainer.fit(x, y, validation_data=(held_x, held_y))
    losses = history["validation_loss"]
    best = int(np.argmin(losses))
    assert len(losses) == best + 5 < 200
    assert trainer.evaluate(held_x, held_y)["loss"] == pytest.approx(losses[best], rel=1e-6)


def test_early_stopping_watches_the_given_column() -> None:
    x, y, held_x, held_y = overfitting()
    options: dict[str, Any] = {"backend": "fused", "learning_rate": 0.1, "epochs": 50}
    stopping = {"name": "early_stopping", "patience": 2, "monitor": "validation_r2"}
    trainer = make(models.mlp(), callbacks=[stopping], metrics=["r2"], **options)
    history = trainer.fit(x, y, validation_data=(held_x, held_y))
    best = int(np.argmax(history["validation_r2"]))  # of r2, more is better
    assert len(history) in (best + 3, 50)
    stopping = {"name": "early_stopping", "monitor": "validation_los"}
    trainer = make(models.mlp(), callbacks=[stopping], **options)
    with pytest.raises(ConfigError, match="no column 'validation_los'; did you mean"):
        trainer.fit(x, y, validation_data=(held_x, held_y))


def test_checkpoints_are_written_when_due_and_old_ones_removed(tmp_path: Path) -> None:
    x, y = regression(rows=40, features=6)
    options: dict[str, Any] = {"backend": "fused", "batch_size": 4, "epochs": 5}

    def steps(**settings: Any) -> list[int]:
        folder = tmp_path / "-".join(f"{k}{v}" for k, v in settings.items())
        spec = {"name": "checkpoint", "folder": str(folder), **settings}
        make(models.mlp(), callbacks=[spec, Recorder()], **options).fit(x, y)
        assert (folder / "best").is_dir() == settings.get("best", True)
        return [int(p.name.removeprefix("step-")) for p in list_checkpoints(folder)]

    assert steps() == [30, 40, 50]
    assert steps(epochs=2, keep=9) == [20, 40, 50]
    assert steps(steps=7, keep=2) == [49, 50]
    assert steps(minutes=60.0, best=False) == [50]


def test_the_best_checkpoint_is_the_best_epochs(tmp_path: Path) -> None:
    x, y, held_x, held_y = overfitting()
    spec = {"name": "checkpoint", "folder": str(tmp_path)}
    options: dict[str, Any] = {"epochs": 40, "learning_rate": 0.1, "batch_size": 8}
    trainer = make(models.mlp(), backend="fused", callbacks=[spec], **options)
    history = trainer.fit(x, y, validation_data=(held_x, held_y))
    best = Trainer.resume(tmp_path / "best", plugins=plugins(), callbacks=[])
    lowest = min(history["validation_loss"])
    assert best.evaluate(held_x, held_y)["loss"] == pytest.approx(lowest, rel=1e-6)


def test_an_interrupted_training_continues_with_its_callbacks(tmp_path: Path) -> None:
    x, y, held_x, held_y = overfitting()

    def made(*more: Any, folder: str) -> Trainer:
        callbacks = [
            {"name": "early_stopping", "patience": 4},
            {"name": "checkpoint", "folder": str(tmp_path / folder), "epochs": 2},
            {"name": "csv_log", "path": str(tmp_path / f"{folder}.csv")},
            *more,
        ]
        backend = {"name": "fused", "steps_per_run": 1}
        options: dict[str, Any] = {"epochs": 100, "learning_rate": 0.1, "batch_size": 8}
        return make(models.mlp(), backend=backend, callbacks=callbacks, **options)

    whole = made(folder="whole")
    history = whole.fit(x, y, validation_data=(held_x, held_y))
    cut = made(EndAt(8, KeyboardInterrupt()), folder="cut")
    assert cut.fit(x, y, validation_data=(held_x, held_y)).interrupted
    again = Trainer.resume(tmp_path / "cut", plugins=plugins())
    rest = again.fit(x, y, validation_data=(held_x, held_y))
    assert len(rest) == len(history)
    same(again.get_state(), whole.get_state(), 0)
    tables = []
    for folder in ("whole", "cut"):
        with open(tmp_path / f"{folder}.csv", newline="") as file:
            tables.append([{**row, "seconds": ""} for row in csv.DictReader(file)])
    assert len(tables[0]) == len(history)
    for one, two in zip(*tables, strict=True):
        np.testing.assert_allclose(
            [float(v or 0) for v in one.values()], [float(v or 0) for v in two.values()], rtol=1e-9
        )


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"name": "early_stopping", "patience": 0}, "patience: must be a number >= 1, got 0"),
        ({"name": "checkpoint", "steps": -1}, "steps: must be a number > 0, got -1"),
        ({"name": "chekpoint"}, "unknown callback 'chekpoint'; did you mean 'checkpoint'"),
    ],
)
def test_mistakes_are_named(spec: dict[str, Any], text: str) -> None:
    with pytest.raises((ConfigError, LookupError), match=text):
        make(models.mlp(), backend="fused", callbacks=[spec])
