"""Schedules: the learning rate over time."""

from __future__ import annotations

import abc
from typing import Any, Literal

import attrs

from ortflex_core.kernel.component import Component, one_of, setting
from ortflex_core.kernel.types import Progress

Unit = Literal["step", "epoch", "rows"]


@attrs.frozen(kw_only=True)
class ScheduleContext:
    """The information that a schedule can use before the first step."""

    slope: Any = attrs.field()
    """``slope(score, label)``: the derivative of the loss by the score of one sample."""
    higher: frozenset[str] = frozenset()
    """The columns of metrics in the History for which higher is better."""


@attrs.frozen(kw_only=True)
class Schedule(Component, abc.ABC):
    """A schedule sets the learning rate as a function of training progress."""

    by: Unit = setting(
        default="step",
        validator=one_of("step", "epoch", "rows"),
        help="the unit of time: completed steps, epochs or rows",
    )

    def time(self, progress: Progress) -> int:
        """The time since the start of the run, in this schedule's unit."""
        return {"step": progress.step, "epoch": progress.epoch, "rows": progress.rows}[self.by]

    def duration(self, progress: Progress) -> int | None:
        """The length of the run, in this schedule's unit; None if it is unknown."""
        totals = {
            "step": progress.total_steps,
            "epoch": progress.epochs,
            "rows": progress.total_rows,
        }
        return totals[self.by]

    def bind(self, context: ScheduleContext) -> Schedule:
        """The schedule of one run; ``context`` has the compiled loss."""
        return self

    @abc.abstractmethod
    def rate(self, base: float, progress: Progress) -> float:
        """The learning rate of the step that comes after ``progress``."""
