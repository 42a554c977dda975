"""Callbacks of other programs: what the files of wandb and trackio have, what optuna hears and prunes."""

from __future__ import annotations

import json
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ortflex_core import CallbackKit, ConfigError, Trainer, hook, internals_of
from ortflex_core.compiler.runtime import session
from ortflex_plugins.callbacks.optuna import Optuna
from tests import models
from tests.plugins.kit_fixtures import effect_of
from tests.training import make, plugins, regression

pytestmark = pytest.mark.per_python


class Interrupt:
    """Ends a training after some epochs, as an error or Ctrl-C does."""

    def __init__(self, epoch: int, error: BaseException) -> None:
        self.epoch, self.error = epoch, error

    @hook(trylast=True)
    def epoch_end(self, progress: Any) -> None:
        if progress.epoch == self.epoch:
            raise self.error


def train(*callbacks: Any, epochs: int = 3) -> Trainer:
    settings = {"epochs": epochs, "batch_size": 10, "learning_rate": 0.05}
    return make(models.mlp(), callbacks=callbacks, **settings)


X, Y = regression(rows=40, features=6)


# wandb --------------------------------------------------------------------------------------------


def records(folder: Path) -> list[Any]:
    """Every record of the newest offline run of a folder."""
    from wandb.proto import wandb_internal_pb2

    for _ in range(300):  # the process that writes may be a moment behind
        files = folder.glob("wandb/offline-run-*/*.wandb")
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        found = [wandb_internal_pb2.Record.FromString(d) for d in logged(newest.read_bytes())]
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError("the run has no end")


def logged(raw: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's format of logs, after wandb's own 7 bytes."""
    at, part, block = 7, b"", 2**15
    while at + 7 <= len(raw):
        left = block - at % block
        if left < 7:  # no header fits: zeros to the end of the block
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", raw, at)
        part += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


def history_of(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


@pytest.fixture
def wandb_spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    pytest.importorskip("wandb")
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "elsewhere"))
    return {"name": "wandb", "project": "tests", "mode": "offline"}


def test_wandb_has_parameters_history_and_model(wandb_spec: Any, tmp_path: Path) -> None:
    trainer = train(wandb_spec)
    trainer.folder = tmp_path
    history = trainer.fit(X, Y, validation_data=0.25)
    rows = history_of(tmp_path)
    assert [row["_step"] for row in rows] == [3, 6, 9]
    for column in history.columns:
        assert [row[column] for row in rows] == pytest.approx(history[column], rel=1e-6)
    found = records(tmp_path)
    config = {u.key: json.loads(u.value_json) for r in found for u in r.run.config.update}
    assert config["optimizer"]["name"] == "sgd"
    assert (config["epochs"], config["learning_rate"]) == (3, 0.05)
    names = [r.request.log_artifact.artifact.name for r in found] + [r.artifact.name for r in found]
    assert f"model-{internals_of(trainer).setup.callbacks[0].run_id_}" in names
    assert [r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit"] == [0]


def test_wandb_continues_its_run_after_a_failure(wandb_spec: Any, tmp_path: Path) -> None:
    trainer = train({**wandb_spec, "model": False}, "checkpoint", Interrupt(2, OSError("full")))
    trainer.folder = tmp_path
    with pytest.raises(OSError, match="full"):
        trainer.fit(X, Y)
    assert [r.exit.exit_code for r in records(tmp_path) if r.HasField("exit")] == [1]
    first = internals_of(trainer).setup.callbacks[0].run_id_
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    again = Trainer.resume(newest, callbacks=[wandb_spec])
    again.folder = tmp_path
    again.fit(X, Y)
    assert internals_of(again).setup.callbacks[0].run_id_ == first
    assert history_of(tmp_path)[-1]["_step"] == 12


class TestWandb(CallbackKit):
    @pytest.fixture
    def component(self, wandb_spec: Any) -> Any:
        return plugins().component("callbacks", {**wandb_spec, "mode": "disabled", "model": False})

    @effect_of
    def effect(self, component: Any, trainer: Any, history: Any) -> None:
        assert component.run_id_


# trackio ------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of trackio's databases: it reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio")
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):
        for name, folder in (("TRACKIO_DIR", tmp_path), ("MEDIA_DIR", tmp_path / "media")):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, folder)
    return tmp_path


def rows_of(store: Path) -> list[tuple[str, int, dict[str, Any]]]:
    with sqlite3.connect(store / "tests.db") as database:
        found = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
        return [(run, step, json.loads(metrics)) for run, step, metrics in found]


def test_trackio_has_parameters_and_history(store: Path) -> None:
    trainer = train({"name": "trackio", "project": "tests", "run": "one"})
    history = trainer.fit(X, Y)
    rows = rows_of(store)
    assert [(run, step) for run, step, _ in rows] == [("one", 4), ("one", 8), ("one", 12)]
    for column in history.columns:
        found = [metrics[column] for *_, metrics in rows]
        np.testing.assert_allclose(found, history[column], rtol=1e-6)
    with sqlite3.connect(store / "tests.db") as database:
        [(text,)] = database.execute("SELECT config FROM configs")
    assert json.loads(text)["optimizer"]["name"] == "sgd"


def test_trackio_continues_its_run(store: Path, tmp_path: Path) -> None:
    spec = {"name": "trackio", "project": "tests"}
    trainer = train(spec, "checkpoint", Interrupt(2, KeyboardInterrupt()))
    trainer.folder = tmp_path
    trainer.fit(X, Y)
    newest = sorted((tmp_path / "checkpoints").glob("step-*"))[-1]
    Trainer.resume(newest, callbacks=[spec]).fit(X, Y)
    rows = rows_of(store)
    assert len({run for run, *_ in rows}) == 1
    assert rows[-1][1] == 12


class TestTrackio(CallbackKit):
    @pytest.fixture
    def component(self, store: Path) -> Any:
        return plugins().component("callbacks", {"name": "trackio", "project": "tests"})

    @pytest.fixture
    def effect(self, store: Path) -> Any:
        def check(component: Any, trainer: Any, history: Any) -> None:
            assert rows_of(store)[-1][2]["loss"] == pytest.approx(history.losses[-1])

        return check


# optuna: what a trial is told, what is pruned, and how often trials compile --------------------------


@pytest.fixture
def optuna() -> Any:
    return pytest.importorskip("optuna")


def trainer_of(values: Any, *callbacks: Any) -> Trainer:
    return make(
        models.mlp(),
        optimizer={"name": "adam", "beta1": values["beta1"]},
        penalty={"name": "l2", "l2": values["l2"]},
        learning_rate=values["learning_rate"],
        callbacks=callbacks,
        epochs=4,
        batch_size=10,
    )


def objective(trial: Any, **options: Any) -> float:
    trial.suggest_float("beta1", 0.5, 0.9)
    trial.suggest_float("l2", 1e-6, 1e-2, log=True)
    trial.suggest_float("learning_rate", 1e-4, 0.1, log=True)
    trainer = trainer_of(trial.params, Optuna(trial=trial, **options))
    return float(trainer.fit(X, Y, validation_data=0.25)["validation_loss"][-1])


def study(pruner: Any) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=pruner)


def test_a_trial_has_the_column_of_the_history(optuna: Any) -> None:
    seen = study(optuna.pruners.NopPruner())
    seen.optimize(objective, n_trials=1)
    [trial] = seen.trials
    wanted = trainer_of(trial.params).fit(X, Y, validation_data=0.25)["validation_loss"]
    assert trial.intermediate_values == dict(zip(range(1, 5), wanted, strict=True))
    assert trial.value == wanted[-1]


def test_a_trial_is_pruned_by_the_study(optuna: Any) -> None:
    seen = study(optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=2))
    seen.optimize(objective, n_trials=2)
    for trial in seen.trials:
        assert trial.state == optuna.trial.TrialState.PRUNED
        assert list(trial.intermediate_values) == [1, 2]


def test_trials_share_what_is_compiled(optuna: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Mock(wraps=session.open_session)
    monkeypatch.setattr(session, "open_session", counted)
    seen = study(optuna.pruners.NopPruner())
    seen.optimize(objective, n_trials=1)
    before = counted.call_count
    seen.optimize(objective, n_trials=10)
    assert counted.call_count == before
    assert len({trial.value for trial in seen.trials}) == 11


def test_a_missing_column_is_an_error(optuna: Any) -> None:
    trial = optuna.trial.FixedTrial({"beta1": 0.9, "l2": 1e-4, "learning_rate": 0.01})
    with pytest.raises(ConfigError, match="no column 'validation_r2'; it has epoch, loss"):
        objective(trial, metric="validation_r2")


@pytest.mark.parametrize("trial", [None, 3, "trial"])
def test_a_trial_is_asked_for(trial: Any, optuna: Any) -> None:
    with pytest.raises(ConfigError, match=r"callbacks=\[Optuna\(trial=trial\)\]"):
        Optuna(trial=trial)


def test_the_trainer_is_usable_after_a_pruned_trial(optuna: Any) -> None:
    seen = study(optuna.pruners.ThresholdPruner(upper=1e-9))
    trial = seen.ask()
    trainer: Trainer = make(models.mlp(), callbacks=[Optuna(trial=trial)], epochs=4, batch_size=10)
    with pytest.raises(optuna.TrialPruned, match="pruned after epoch 1 with validation_loss"):
        trainer.fit(X, Y, validation_data=0.25)
    assert len(trainer.history_) == 1
    assert np.isfinite(trainer.predict(X)).all()
