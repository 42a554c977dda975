"""Ctrl-C and hooks that stop a training lose no step and count none twice: it ends in the same bits.

What is kept of a training is what comes back: weights, slots, statistics and the step.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ortflex_core import Progress, Trainer, hook, internals_of
from ortflex_core.kernel.interrupts import Interrupts
from ortflex_core.kernel.last_good import LastGood
from tests import models
from tests.training import EndAt, bits, every_backend, make, plugins, records, regression, same

PARTS = 40 if os.environ.get("ORTFLEX_TEST_SAMPLE", "1") == "1" else 16
"""How finely a training is cut."""
X, Y = regression(rows=22, features=6)
HELD_OUT = regression(rows=7, features=6, seed=5)


class CtrlC:
    """Presses Ctrl-C at the n-th line of the loop and the engine; counts them if there is no n."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.lines = at, 0

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not (path.endswith("ortflex_core/kernel/loop.py") or "/backends/" in path):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                signal.raise_signal(signal.SIGINT)
        return self._trace

    @hook(trylast=True)
    def train_start(self) -> None:
        sys.settrace(self._trace)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace = self._trace
            frame = frame.f_back

    @hook(tryfirst=True)
    def train_end(self) -> None:
        sys.settrace(None)


def training(*callbacks: Any, **options: Any) -> Trainer:
    options = {"optimizer": "adam", "batch_size": 5, "epochs": 3, "learning_rate": 0.01} | options
    return make(models.mlp(), callbacks=callbacks, metrics=["mae"], **options)


def whole(**options: Any) -> tuple[Trainer, list[dict[str, float]]]:
    trainer = training("early_stopping", **options)
    return trainer, records(trainer.fit(X, Y, validation_data=HELD_OUT))


@every_backend
def test_ctrl_c_at_any_line_loses_nothing(backend: str, tmp_path: Path) -> None:
    spec: Any = {"name": "fused", "steps_per_run": 2} if backend == "fused" else backend
    accumulate = 2 if backend in ("fused", "training_agent") else 1
    undisturbed, history = whole(backend=spec, accumulate=accumulate)
    wanted, before = bits(undisturbed), signal.getsignal(signal.SIGINT)
    count = CtrlC()
    training(count, backend=spec, accumulate=accumulate).fit(X, Y, validation_data=HELD_OUT)
    interrupted = 0
    # From the second epoch's first step into the third epoch; each at another line of a step.
    for at in range(count.lines // 3, count.lines * 3 // 4, 1 + count.lines // PARTS):
        place = tmp_path / str(at)
        callbacks = ["early_stopping", {"name": "checkpoint", "folder": str(place), "steps": 999}]
        trainer = training(*callbacks, CtrlC(at), backend=spec, accumulate=accumulate)
        cut = trainer.fit(X, Y, validation_data=HELD_OUT)
        assert signal.getsignal(signal.SIGINT) is before
        interrupted += cut.interrupted
        again = Trainer.resume(place, plugins=plugins())
        gone_on = records(again.fit(X, Y, validation_data=HELD_OUT))
        assert bits(again) == wanted, at
        assert len(gone_on) == len(history) == 3
        for mine, theirs in zip(gone_on, history, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12), at
    assert interrupted > PARTS // 4


@every_backend
@pytest.mark.parametrize("at", [1, 4, 5, 7])
def test_a_stopped_epoch_continues_there(backend: str, at: int, tmp_path: Path) -> None:
    def step_end(progress: Progress) -> bool:
        return progress.step == at

    undisturbed = training(backend=backend)
    history = records(undisturbed.fit(X, Y, validation_data=HELD_OUT))
    named = {"name": "checkpoint", "folder": str(tmp_path / "c"), "best": False}
    trainer = training(step_end, named, backend=backend)
    cut = trainer.fit(X, Y, validation_data=HELD_OUT)
    assert cut["rows"] == ([22.0] * (at // 5) + [5.0 * (at % 5)] * (at % 5 > 0))
    assert np.isfinite(cut["validation_loss"]).all()  # scores of the existing weights
    trainer.save(tmp_path / "by hand")
    for folder in ("by hand", "c"):
        again = Trainer.resume(tmp_path / folder, plugins=plugins(), callbacks=[])
        gone_on = records(again.fit(X, Y, validation_data=HELD_OUT))
        # With a hook for each step, these run one step at a time, without it several in one graph.
        if backend in ("fused", "openvino"):
            same(again.get_state(), undisturbed.get_state(), 1e-4)
        else:
            assert bits(again) == bits(undisturbed)
        for mine, theirs in zip(gone_on, history, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


def test_an_interrupted_fit_is_saved_in_place_and_the_next_starts_again(tmp_path: Path) -> None:
    spec = {"name": "fused", "steps_per_run": 1}
    undisturbed = training(backend=spec)
    undisturbed.fit(X, Y)
    trainer = training(EndAt(7, KeyboardInterrupt()), backend=spec)
    assert trainer.fit(X, Y).interrupted
    trainer.save(tmp_path / "c")
    again = Trainer.resume(tmp_path / "c", plugins=plugins(), callbacks=[])
    again.fit(X, Y)
    assert bits(again) == bits(undisturbed)
    assert len(trainer.fit(X, Y)) == 2  # a training of its own, interrupted at its seventh step


def test_weights_that_a_callback_restored_are_not_those_of_the_interruption(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = {"name": "checkpoint", "folder": str(tmp_path / "c"), "best": False}
    trainer = training(EndAt(7, KeyboardInterrupt()), "early_stopping", named, backend="fused")
    with caplog.at_level(logging.INFO, "ortflex"):
        trainer.fit(X, Y, validation_data=HELD_OUT)
    note = "only checkpoints that were written before that can be resumed from the interruption"
    assert note in caplog.text
    trainer.save(tmp_path / "best")
    again = Trainer.resume(tmp_path / "best", plugins=plugins(), callbacks=[])
    assert len(again.fit(X, Y)) == 3  # another training, from the best weights
    again = Trainer.resume(tmp_path / "c", plugins=plugins())
    again.fit(X, Y, validation_data=HELD_OUT)
    same(again.get_state(), whole(backend="fused")[0].get_state(), 1e-4)


def test_a_training_that_a_hook_ended_continues_only_with_more_epochs(tmp_path: Path) -> None:
    def epoch_end(record: Any) -> bool:
        return bool(record["epoch"] == 2)

    named = {"name": "checkpoint", "folder": str(tmp_path)}
    training(epoch_end, named, backend="fused").fit(X, Y)
    again = Trainer.resume(tmp_path, plugins=plugins(), callbacks=[])
    assert len(again.fit(X, Y)) == 2
    again = Trainer.resume(tmp_path, plugins=plugins(), callbacks=[], epochs=3)
    assert [line["epoch"] for line in again.fit(X, Y)] == [1, 2, 3]
    undisturbed = training(backend="fused")
    undisturbed.fit(X, Y)
    assert bits(again) == bits(undisturbed)


def test_the_second_ctrl_c_takes_effect_at_once() -> None:
    with Interrupts() as interrupts:
        interrupts.held = True
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.check()  # it has come
        interrupts.held = True
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_handlers_of_others_are_asked_and_come_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Interrupts() as interrupts:
            interrupts.held = True
            signal.raise_signal(signal.SIGINT)
            assert not seen
            interrupts.check()
            assert seen == [signal.SIGINT]
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert len(seen) == 3
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_training_in_another_thread_touches_no_signals() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def step_end() -> None:
        found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=lambda: training(step_end, backend="fused").fit(X, Y))
    thread.start()
    thread.join(60)
    assert set(found) == {before}


def everything(engine: Any) -> dict[str, Any]:
    return {**engine.state(), **engine.slots(), **engine.buffers()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one | other)


@every_backend
def test_the_last_good_state_is_restored_exactly(backend: str) -> None:
    trainer = training(backend=backend, epochs=1)
    trainer.fit(X, Y)
    engine, good = trainer.engine, LastGood()
    assert not good.restore()
    for _ in range(3):  # from the second time on into the same memory
        before = everything(engine)
        assert good.keep(engine) is None
        trainer.step((X[:5], Y[:5]))
        assert not equal(everything(engine), before)
        assert good.restore()
        assert equal(everything(engine), before)
        trainer.step((X[5:10], Y[5:10]))


@every_backend
def test_a_state_that_is_not_finite_is_named_and_not_kept(backend: str) -> None:
    trainer = training(backend=backend, epochs=1)
    trainer.fit(X, Y)
    engine, good = trainer.engine, LastGood()
    before = everything(engine)
    good.keep(engine)
    name = internals_of(trainer).problem.parameters[1]
    engine.load({name: np.full_like(engine.state()[name], np.inf)})
    assert good.keep(engine) == name
    good.restore()
    assert equal(everything(engine), before)


class Copying:
    """An engine whose state is copied whenever it is read."""

    def __init__(self) -> None:
        self.weights, self.reads = {"W": np.ones(2)}, 0

    def state(self) -> dict[str, Any]:
        self.reads += 1
        return {name: array.copy() for name, array in self.weights.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.weights = state

    slots = buffers = lambda self: {}
    load_slots = load_buffers = lambda self, values: None


def test_a_state_is_read_once_and_a_bad_one_does_not_replace_the_good_one() -> None:
    good, engine = LastGood(), Copying()
    assert good.keep(engine) is None  # type: ignore[arg-type]
    assert engine.reads == 1
    engine.weights["W"][1] = np.inf
    assert good.keep(engine) == good.not_finite(engine) == "W"  # type: ignore[arg-type]
    assert good.restore()
    np.testing.assert_array_equal(engine.weights["W"], [1, 1])
