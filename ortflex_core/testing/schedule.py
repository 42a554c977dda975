"""The kit of schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest

from ortflex_core import ConfigError, Progress, Schedule, ScheduleContext, Unit, hook
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit
from ortflex_core.testing.running import close, require

EPOCHS, STEPS, ROWS = 3, 4, 10
"""The training of the kit: three epochs of four steps with ten rows each."""
TOTAL = {"step": EPOCHS * STEPS, "epoch": EPOCHS, "rows": EPOCHS * STEPS * ROWS}
BASE = 0.1


class ScheduleKit(ReferenceKit):
    """Override ``component`` and ``reference``.

    ``reference(base, time, total)`` is the rate at a time in the schedule's unit; ``total`` is the end of
    the training in this unit. Without a reference (None), the rates are not compared.
    """

    kind: ClassVar[str] = "schedules"

    def test_value(self, component: Schedule, compared: Callable[[float, int, int], float]) -> None:
        """The rate of every step of a run is the reference's."""
        bound = component.bind(context())
        for step in range(EPOCHS * STEPS):
            now = progress(step)
            wanted = compared(BASE, bound.time(now), TOTAL[bound.by])
            close(bound.rate(BASE, now), wanted, 1e-12, f"the rate of step {step}")

    def test_rates_are_numbers_from_0_on(self, component: Schedule) -> None:
        """Rates are finite, non-negative Python numbers, during the training and after it."""
        bound = component.bind(context())
        for step in (*range(EPOCHS * STEPS), EPOCHS * STEPS, 1000):
            rate = bound.rate(BASE, progress(step))
            given: Any = rate
            good = isinstance(given, int | float) and math.isfinite(given) and given >= 0
            require(good, f"the rate of step {step} is {rate!r}")

    def test_it_is_pure(self, component: Schedule) -> None:
        """The rate of a step depends on the progress alone, not on earlier calls."""
        bound = component.bind(context())
        forwards = [bound.rate(BASE, progress(step)) for step in range(8)]
        backwards = [bound.rate(BASE, progress(step)) for step in reversed(range(8))]
        equal = forwards == backwards[::-1]
        require(equal, f"{component.name}: a second call returns different rates")

    def test_units(self, component: Schedule) -> None:
        """By epochs, all steps of an epoch have the same rate; an unknown unit is refused."""
        by_epoch = _counting(component, "epoch").bind(context())
        for epoch in range(EPOCHS):
            rates = {by_epoch.rate(BASE, progress(epoch * STEPS + k)) for k in range(STEPS)}
            require(len(rates) == 1, f"by='epoch', but the rates of an epoch are {sorted(rates)}")
        with pytest.raises(ValueError, match="by must be one of"):
            attrs.evolve(component, by="minutes")  # type: ignore[arg-type]

    def test_an_endless_training(self, component: Schedule) -> None:
        """Without a known length, there is a rate, or a ConfigError that names the missing argument."""
        bound = component.bind(context())
        try:
            rate = bound.rate(BASE, Progress(step=5, epoch=0, rows=50))
        except ConfigError as error:
            require(component.name in str(error), f"the error does not name the schedule: {error}")
        else:
            require(math.isfinite(rate) and rate >= 0, f"the rate of an endless training is {rate}")

    def test_backends(self, component: Schedule) -> None:
        """Every backend trains with exactly these rates."""
        x, y = running.regression(rows=16)
        bound = component.bind(context())

        def train(backend: str) -> None:
            listener = _Rates()
            given = {"schedule": component, "learning_rate": BASE, "callbacks": [listener]}
            running.trainer(running.linear_model(), backend=backend, epochs=2, **given).fit(x, y)
            wanted = [bound.rate(BASE, progress(step, epochs=2, rows=4)) for step in range(8)]
            close(listener.rates, wanted, 1e-9, f"the rates on {backend}")

        running.on_every_backend(train, f"the schedule {component.name}")


class _Rates:
    """Remembers the rate of every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    @hook
    def step_end(self, rate: float) -> None:
        self.rates.append(rate)


def context() -> ScheduleContext:
    """The context of a schedule, with the slope of the squared error."""
    return ScheduleContext(slope=lambda score, label: 2 * (score - label))


def progress(step: int, epochs: int = EPOCHS, rows: int = ROWS) -> Progress:
    """The progress of a run with four steps per epoch before a step."""
    return Progress(
        step=step,
        epoch=step // STEPS,
        rows=step * rows,
        epochs=epochs,
        steps_per_epoch=STEPS,
        rows_per_epoch=STEPS * rows,
    )


def _counting(schedule: Schedule, by: Unit) -> Schedule:
    """The schedule, and the schedules inside it, in another unit."""
    inner: dict[str, Any] = {}
    for field in attrs.fields(type(schedule)):
        value = getattr(schedule, field.name)
        if isinstance(value, Schedule):
            inner[field.name] = _counting(value, by)
        elif isinstance(value, tuple) and any(isinstance(v, Schedule) for v in value):
            inner[field.name] = tuple(_counting(v, by) for v in value)
    return attrs.evolve(schedule, by=by, **inner)
