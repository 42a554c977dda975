"""The kit of callbacks rejects planted mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from ortflex_core import CallbackKit, hook
from tests.core.planted import Planted, PlantedMistakes, Subject, but, called

pytestmark = pytest.mark.once


@attrs.define(kw_only=True)
class Counter:
    """Counts the steps of a training."""

    every: int = 1
    count: int = attrs.field(default=0, init=False)

    @hook
    def train_start(self, progress: Any) -> None:
        if progress.step == 0:
            self.count = 0

    @hook
    def step_end(self) -> None:
        self.count += 1

    @hook
    def checkpoint_saving(self, saved: Any) -> None:
        saved.put("counter", {"count": self.count})

    @hook
    def checkpoint_loading(self, saved: Any) -> None:
        self.count = saved.get("counter")["count"]


def counted(component: Any, trainer: Any, history: Any) -> None:
    assert component.count == 12, "it counts all steps"


def overridden(name: str) -> Any:
    """The callback, which does nothing in one hook."""

    @hook
    def silent(self: Any) -> None: ...

    silent.__name__ = name
    return but(Counter(), **{name: silent})


@attrs.define(kw_only=True)
class Meddling(Counter):
    @hook
    def epoch_end(self, trainer: Any) -> None:
        trainer.set_state({n: 0.9 * a for n, a in trainer.get_state().items()})


class Anything:
    """Takes all there is."""

    def __init__(self, **values: Any) -> None:
        self.values = values


@attrs.define(kw_only=True)
class Lookahead:
    """Every ``every`` steps the weights go half of the way back to where they were."""

    every: int = 3
    saves: ClassVar[bool] = True
    count: int = attrs.field(default=0, init=False)
    slow: Any = attrs.field(default=None, init=False, eq=False)

    @hook
    def train_start(self, trainer: Any, progress: Any) -> None:
        if progress.step == 0:
            self.count, self.slow = 0, trainer.get_state()

    @hook
    def step_end(self, trainer: Any) -> None:
        self.count += 1
        if self.count % self.every == 0:
            now = trainer.get_state()
            self.slow = {n: (a + now[n]) / 2 for n, a in self.slow.items()}
            trainer.set_state(self.slow)

    @hook
    def checkpoint_saving(self, saved: Any) -> None:
        count = {"count": self.count} if self.saves else {}
        saved.put("lookahead", {**count, **{f"slow.{n}": a for n, a in self.slow.items()}})

    @hook
    def checkpoint_loading(self, saved: Any) -> None:
        kept = saved.get("lookahead")
        self.count = kept.pop("count", 0)
        self.slow = {n.removeprefix("slow."): a for n, a in kept.items()}


@attrs.define(kw_only=True)
class InRuns:
    """Moves weights after each run of steps, of which a backend makes one or many at once."""

    @hook
    def steps_end(self, trainer: Any) -> None:
        trainer.set_state({n: 0.9 * a for n, a in trainer.get_state().items()})


@attrs.define(kw_only=True)
class CountsRuns:
    """Moves weights where it may, by how many runs there were."""

    runs: int = 0

    @hook
    def steps_end(self) -> None:
        self.runs += 1

    @hook
    def epoch_end(self, trainer: Any) -> None:
        factor = 0.99**self.runs
        trainer.set_state({n: factor * a for n, a in trainer.get_state().items()})


FORGETFUL = but(Lookahead(), saves=False)
"""What an epoch of three steps cannot show: the count of every three starts again at 0."""


def nothing(component: Any, trainer: Any, history: Any) -> None: ...


def test_what_counts_steps_passes(tmp_path: Path) -> None:
    """A callback with weights and a count of its own, rightly saved, passes; its step divides nothing."""
    for check in ("test_resume", "test_resume_in_mid_epoch", "test_steps_per_run"):
        known = {"tmp_path": tmp_path / check, "effect": nothing}
        called(CallbackKit, check, Lookahead(), known)


@pytest.mark.parametrize("every", [2, 3, 4, 5, 7])
def test_a_count_that_is_forgotten_is_found(every: int, tmp_path: Path) -> None:
    """Whatever the number of steps that a callback counts up to, the kit's checkpoint is between."""
    forgetful = attrs.evolve(FORGETFUL, every=every)
    with pytest.raises(AssertionError, match="step 11"):
        called(CallbackKit, "test_resume_in_mid_epoch", forgetful, {"tmp_path": tmp_path})


CALLBACKS = [
    Planted("test_resume_in_mid_epoch", FORGETFUL, "step 11"),
    Planted("test_steps_per_run", InRuns(), "set_state: weights cannot be changed in the hooks"),
    Planted("test_steps_per_run", CountsRuns(), "steps_per_run='auto' and steps_per_run=1"),
    Planted("test_hooks", but(Counter(), epoch_end=nothing), "epoch_end: the decorator @hook is"),
    Planted("test_hooks", overridden("epoch_ended"), "unknown hook 'epoch_ended'"),
    Planted(
        "test_is_frozen",
        but(Counter(), __eq__=lambda a, b: a is b, __hash__=object.__hash__),
        "a copy of a new callback is not equal",
    ),
    Planted("test_bad_parameters_are_refused", Anything(), "DID NOT RAISE"),
    Planted("test_effect", overridden("step_end"), "it counts all steps"),
    Planted("test_a_second_training", overridden("train_start"), "it counts all steps"),
    Planted("test_watching", Meddling(), "the losses change on"),
    Planted("test_resume", overridden("checkpoint_loading"), "it counts all steps"),
]


class TestCallbacks(PlantedMistakes):
    subjects = (Subject(CallbackKit, Counter(), CALLBACKS, {"effect": counted}),)
