"""What may change while a training runs, how it ends before its time, and what one that fails leaves."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    ConfigError,
    DataError,
    OrtflexError,
    Progress,
    Trainer,
    TrainingDiverged,
    hook,
    internals_of,
)
from tests import models
from tests.training import Recorder, every_backend, make, plugins, regression, same

LATER = {"groups": [{"params": ["W2"], "start_epoch": 2}], "epochs": 3, "batch_size": 10}


class At:
    """Calls a function after one step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    @hook
    def step_end(self, trainer: Trainer, progress: Any) -> None:
        if progress.step == self.step:
            self.act(trainer)


def trained(act: Any, **options: Any) -> Trainer:
    x, y = regression(features=6)
    callbacks = [At(3, act)]
    trainer = make(models.mlp(), callbacks=callbacks, **LATER | options)
    trainer.fit(x, y)
    return trainer


@every_backend
def test_the_own_state_may_be_set_in_a_hook_while_parameters_wait(backend: str) -> None:
    """They may be constants of the engine: a new engine would not be that of the loop."""
    if backend == "training_session":
        pytest.skip("it has no groups")
    plain = trained(lambda t: None, backend=backend)
    again = trained(lambda t: t.set_state(t.get_state()), backend=backend)
    same(again.get_state(), plain.get_state(), 0.0)
    assert again.backend_ == plain.backend_


@every_backend
def test_a_trained_parameter_that_is_set_in_a_hook_is_trained_on(backend: str) -> None:
    def zero(trainer: Trainer) -> None:
        trainer.set_state({"W1": np.zeros_like(trainer.get_state()["W1"])})

    x, y = regression(features=6)
    first = make(models.mlp(), **LATER | {"backend": backend, "epochs": 1, "shuffle": False})
    first.fit(x[:30], y[:30])
    zero(first)
    first.step((x[30:], y[30:]))
    second = trained(zero, backend=backend, epochs=1, shuffle=False)
    assert np.any(second.get_state()["W1"])
    same(second.get_state(), first.get_state())


def test_another_value_of_a_parameter_that_waits_is_refused() -> None:
    def change(trainer: Trainer) -> None:
        state = trainer.get_state()
        trainer.set_state({"W1": state["W1"], "W2": np.ones_like(state["W2"])})

    with pytest.raises(OrtflexError, match="a parameter that is trained from a later epoch"):
        trained(change)


def test_the_engine_of_a_training_is_not_forgotten_while_it_runs(tmp_path: Path) -> None:
    for act in (
        lambda t: internals_of(t).forget_engine(),
        lambda t: t.restore(t.save(tmp_path / "checkpoint")),
    ):
        with pytest.raises(OrtflexError, match="before or after fit"):
            trained(act)


def test_a_refused_fit_leaves_the_resumed_position(tmp_path: Path) -> None:
    x, y = regression(features=6)

    def stop(trainer: Trainer) -> None:
        trainer.save(tmp_path / "checkpoint")
        raise KeyboardInterrupt

    trained(stop)
    straight = Trainer.resume(tmp_path / "checkpoint", plugins=plugins(), callbacks=[])
    straight.fit(x, y)
    refused = Trainer.resume(tmp_path / "checkpoint", plugins=plugins(), callbacks=[])
    for wrong in (x[:30], x[:, :5], x * np.nan):
        with pytest.raises(DataError):
            refused.fit(wrong, y[: len(wrong)])
    refused.fit(x, y)
    same(refused.get_state(), straight.get_state(), 0.0)
    assert refused.history_.losses == straight.history_.losses


def test_an_engine_that_fails_shows_its_first_error_and_callbacks_end() -> None:
    class Breaks:
        ended = 0

        @hook
        def epoch_end(self, trainer: Trainer) -> None:
            trainer.engine.run = partial(self.fail, trainer.engine)  # type: ignore[method-assign]

        def fail(self, engine: Any, *args: Any) -> Any:
            def state() -> Any:
                raise RuntimeError("there is no state")

            engine.state = state
            raise RuntimeError("the device is lost")

        @hook
        def train_end(self, trainer: Trainer) -> None:
            self.ended += 1

    x, y = regression(features=6)
    breaks = Breaks()
    trainer = make(models.mlp(), callbacks=[breaks], epochs=3)
    with pytest.raises(RuntimeError, match="the device is lost"):
        trainer.fit(x, y)
    assert breaks.ended == 1


@pytest.mark.parametrize("name", ["optimizer", "device"])
def test_what_the_step_was_built_with_cannot_be_assigned(name: str) -> None:
    trainer = make(models.linear())
    with pytest.raises((AttributeError, ConfigError), match=name):
        setattr(trainer, name, getattr(trainer, name))


@every_backend
def test_gradients_of_an_accumulated_step_are_those_of_all_its_batches(backend: str) -> None:
    x, y = regression(rows=20)
    options = {"backend": backend, "learning_rate": 1e-30, "shuffle": False, "epochs": 1}
    whole = make(models.linear(), **options, batch_size=20)
    whole.fit(x, y)
    halves = make(models.linear(), **options, batch_size=10, accumulate=2)
    if not hasattr(whole.engine, "gradients"):
        pytest.skip("the engine keeps no gradients")
    halves.fit(x, y)
    same(halves.engine.gradients(), whole.engine.gradients())  # type: ignore[attr-defined]


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
