"""When and how a training ends before its time, and what rates it accepts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ortflex_core import ConfigError, Progress, TrainingDiverged
from tests import models
from tests.training import Recorder, every_backend, make, regression, same


@every_backend
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(backend: str) -> None:
    x, y = regression(rows=40)
    model = models.linear()
    recorder = Recorder()
    trainer = make(
        model, backend=backend, epochs=50, batch_size=10, learning_rate=50.0, callbacks=[recorder]
    )
    with pytest.raises(TrainingDiverged) as caught:
        trainer.fit(x, y)
    text = str(caught.value)
    step = recorder.all("step_end")[-1]["progress"].step + 1
    assert f"at step {step} (learning rate 50); the last losses were " in text
    assert "start of epoch" in text
    assert all(np.isfinite(a).all() for a in trainer.get_state().values())
    assert isinstance(recorder.all("exception")[0]["error"], TrainingDiverged)
    assert recorder.names()[-1] == "train_end"
    # What is kept is the state at the start of the epoch that failed.
    failed = recorder.all("exception")[0]["progress"].epoch
    again = make(model, backend=backend, epochs=failed, batch_size=10, learning_rate=50.0)
    again.fit(x, y)
    same(trainer.get_state(), again.get_state(), 1e-6)


@every_backend
def test_divergence_is_found_within_the_epoch_without_hooks(backend: str) -> None:
    x, y = regression(rows=1000)
    trainer = make(models.linear(), backend=backend, epochs=1, batch_size=1, learning_rate=1e6)
    with pytest.raises(TrainingDiverged, match="start of epoch 1 was restored"):
        trainer.fit(x, y)
    same(trainer.get_state(), models.weights_of(models.linear()), 1e-7)


@every_backend
def test_weights_that_overflow_in_the_very_last_step_are_noticed(backend: str) -> None:
    # The loss is 2.5e35 and the gradient 1e37: only rate · gradient is out of range.
    x = np.full((4, 5), 1e19, np.float32)
    y = np.zeros((4, 1), np.float32)
    weights = {"coef": np.full((5, 1), 1e-2, np.float32), "intercept": np.zeros(1, np.float32)}
    trainer = make(models.linear(), backend=backend, epochs=1, batch_size=4, learning_rate=1e3)
    trainer.set_state(weights)
    with pytest.raises(TrainingDiverged, match="parameter 'coef' is no longer finite at step 1"):
        trainer.fit(x, y)
    same(trainer.get_state(), weights, 1e-7)


@every_backend
def test_ctrl_c_gives_a_history_and_a_whole_state(backend: str) -> None:
    x, y = regression(rows=40)

    def step_end(progress: Progress) -> None:
        if progress.step == 6:
            raise KeyboardInterrupt

    recorder = Recorder()
    options: dict[str, Any] = {"backend": backend, "batch_size": 10, "shuffle": False}
    trainer = make(models.linear(), epochs=5, callbacks=[step_end, recorder], **options)
    history = trainer.fit(x, y)
    assert history.interrupted
    assert history is trainer.history_
    assert history["rows"] == [40.0, 20.0]
    assert recorder.names()[-2:] == ["exception", "train_end"]
    stepped = make(models.linear(), epochs=5, **options)
    for k in (0, 10, 20, 30, 0, 10):
        stepped.step((x[k : k + 10], y[k : k + 10]))
    same(trainer.get_state(), stepped.get_state(), 1e-7)
    assert not make(models.linear(), epochs=1, **options).fit(x, y).interrupted


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_a_scheduled_rate_below_zero_or_not_finite_is_refused(bad: float) -> None:
    def given(base: float, step: int) -> float:
        return bad if step == 1 else base

    trainer = make(models.linear(), epochs=1, batch_size=10, schedule=given)
    text = r"given.* gives the learning rate .* at step 1; expected a finite number >= 0"
    with pytest.raises(ConfigError, match=text):
        trainer.fit(*regression(rows=30))
    assert all(np.isfinite(a).all() for a in trainer.get_state().values())


@every_backend
def test_a_scheduled_rate_of_zero_moves_nothing(backend: str) -> None:
    options = {"epochs": 1, "batch_size": 10, "schedule": lambda base: 0.0}
    trainer = make(models.linear(), backend=backend, **options)
    trainer.fit(*regression(rows=30))
    same(trainer.get_state(), models.weights_of(models.linear()), 0)
