"""The schedule ``chained``."""

from __future__ import annotations

from functools import reduce
from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, ScheduleContext
from ortflex_plugins.schedules._composition import schedules_field


@attrs.frozen(kw_only=True)
class Chained(Schedule):
    """Several schedules together: the rate of each one is the base of the next one.

    If all schedules multiply the base by a factor, the result is the product of the factors. All must
    count in the same unit.

    Raises:
        ValueError: ``schedules`` is empty.
        TypeError: an item of ``schedules`` is not a schedule.
        ConfigError: a schedule counts by another unit.

    >>> from ortflex_plugins.schedules.exponential import Exponential
    >>> from ortflex_plugins.schedules.step import StepDecay
    >>> chain = Chained(schedules=(Exponential(gamma=0.5), StepDecay(size=2, gamma=0.5)))
    >>> [chain.rate(1.0, Progress(step=t)) for t in range(4)]
    [1.0, 0.5, 0.125, 0.0625]

    Source: torch.optim.lr_scheduler.ChainedScheduler, which gives the same rates for schedules that
    multiply by a factor.
    """

    name: ClassVar[str] = "chained"

    schedules: tuple[Schedule, ...] = schedules_field()

    def bind(self, context: ScheduleContext) -> Schedule:
        """The schedule with its parts bound."""
        return attrs.evolve(self, schedules=tuple(s.bind(context) for s in self.schedules))

    def rate(self, base: float, progress: Progress) -> float:
        """The rate of the last schedule."""
        return reduce(lambda rate, part: part.rate(rate, progress), self.schedules, base)
