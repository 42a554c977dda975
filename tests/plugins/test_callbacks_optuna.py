"""The callback ``optuna``: what a trial is told, what is pruned, and how often trials compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import ConfigError, Trainer
from ortflex_core.compiler.runtime import session
from ortflex_plugins.callbacks.optuna import Optuna
from tests import models
from tests.training import make, regression

pytestmark = pytest.mark.per_python

optuna = pytest.importorskip("optuna")
X, Y = regression(rows=40, features=6)


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
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=pruner)


def test_a_trial_has_the_column_of_the_history() -> None:
    seen = study(optuna.pruners.NopPruner())
    seen.optimize(objective, n_trials=1)
    [trial] = seen.trials
    wanted = trainer_of(trial.params).fit(X, Y, validation_data=0.25)["validation_loss"]
    assert trial.intermediate_values == dict(zip(range(1, 5), wanted, strict=True))
    assert trial.value == wanted[-1]


def test_a_trial_is_pruned_by_the_study() -> None:
    seen = study(optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=2))
    seen.optimize(objective, n_trials=2)
    for trial in seen.trials:
        assert trial.state == optuna.trial.TrialState.PRUNED
        assert list(trial.intermediate_values) == [1, 2]


def test_trials_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    first = session.open_session

    def counted(*arguments: Any) -> Any:
        opened.append(1)
        return first(*arguments)

    monkeypatch.setattr(session, "open_session", counted)
    seen = study(optuna.pruners.NopPruner())
    seen.optimize(objective, n_trials=1)
    before = len(opened)
    seen.optimize(objective, n_trials=10)
    assert len(opened) == before
    assert len({trial.value for trial in seen.trials}) == 11


def test_a_missing_column_is_an_error() -> None:
    trial = optuna.trial.FixedTrial({"beta1": 0.9, "l2": 1e-4, "learning_rate": 0.01})
    with pytest.raises(ConfigError, match="no column 'validation_r2'; it has epoch, loss"):
        objective(trial, metric="validation_r2")


@pytest.mark.parametrize("trial", [None, 3, "trial"])
def test_a_trial_is_asked_for(trial: Any) -> None:
    with pytest.raises(ConfigError, match=r"callbacks=\[Optuna\(trial=trial\)\]"):
        Optuna(trial=trial)


def test_the_trainer_is_usable_after_a_pruned_trial() -> None:
    seen = study(optuna.pruners.ThresholdPruner(upper=1e-9))
    trial = seen.ask()
    trainer: Trainer = make(models.mlp(), callbacks=[Optuna(trial=trial)], epochs=4, batch_size=10)
    with pytest.raises(optuna.TrialPruned, match="pruned after epoch 1 with validation_loss"):
        trainer.fit(X, Y, validation_data=0.25)
    assert len(trainer.history_) == 1
    assert np.isfinite(trainer.predict(X)).all()
