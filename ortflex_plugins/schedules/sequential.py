"""Schedules that are made of others: ``sequential``, ``chained``."""

from __future__ import annotations

from bisect import bisect_right
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar

import attrs

from ortflex_core import Progress, Schedule, ScheduleContext, number, setting
from ortflex_plugins.schedules._composition import schedules_field, since


@attrs.frozen(kw_only=True)
class _Composition(Schedule):
    """What the family shares: its parts, which count in one unit."""

    schedules: tuple[Schedule, ...] = schedules_field()

    def bind(self, context: ScheduleContext) -> Schedule:
        """The schedule with its parts bound."""
        return attrs.evolve(self, schedules=tuple(s.bind(context) for s in self.schedules))


@attrs.frozen(kw_only=True)
class Sequential(_Composition):
    """Schedules one after another: schedule k applies from ``milestones[k − 1]`` to ``milestones[k]``.

    The time of each schedule starts at 0, and a schedule whose length is that of the training ends when
    the next one begins. All must count in the same unit, which is that of the milestones.

    Raises:
        ValueError: the number of milestones is not the number of schedules − 1, a milestone is not
            positive, or the milestones do not rise.
        TypeError: an item of ``schedules`` is not a schedule.
        ConfigError: a schedule counts by another unit.

    >>> from ortflex_plugins.schedules.cosine import Cosine
    >>> from ortflex_plugins.schedules.warmup import Warmup
    >>> chain = Sequential(schedules=(Warmup(length=4, start=0.0), Cosine(period=8)), milestones=(4,))
    >>> [chain.rate(0.5, Progress(step=t)) for t in (0, 2, 4, 8)]
    [0.0, 0.25, 0.5, 0.25]

    Source: torch.optim.lr_scheduler.SequentialLR.
    """

    name: ClassVar[str] = "sequential"

    milestones: tuple[int, ...] = setting(
        converter=tuple,
        validator=attrs.validators.deep_iterable(number(ge=1)),
        help="the times at which the next schedule begins",
    )

    @milestones.validator
    def _check_milestones(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if len(value) != len(self.schedules) - 1:
            raise ValueError(
                f"Sequential.milestones must be {len(self.schedules) - 1}, one fewer than schedules, "
                f"got {tuple(value)!r}"
            )
        if any(a >= b for a, b in pairwise(value)):
            raise ValueError(f"Sequential.milestones must rise, got {tuple(value)!r}")

    def rate(self, base: float, progress: Progress) -> float:
        """The rate of the schedule that applies at ``t``."""
        k = bisect_right(self.milestones, self.time(progress))
        start, end = (0, *self.milestones)[k], (*self.milestones, None)[k]
        inner = since(self.by, progress, start, end, self.duration(progress))
        return self.schedules[k].rate(base, inner)


@attrs.frozen(kw_only=True)
class Chained(_Composition):
    """Several schedules together: the rate of each one is the base of the next one.

    If all schedules multiply the base by a factor, the result is the product of the factors. All must
    count in the same unit.

    Raises:
        ValueError: ``schedules`` is empty.
        TypeError: an item of ``schedules`` is not a schedule.
        ConfigError: a schedule counts by another unit.

    >>> from ortflex_plugins.schedules.step import Exponential, StepDecay
    >>> chain = Chained(schedules=(Exponential(gamma=0.5), StepDecay(size=2, gamma=0.5)))
    >>> [chain.rate(1.0, Progress(step=t)) for t in range(4)]
    [1.0, 0.5, 0.125, 0.0625]

    Source: torch.optim.lr_scheduler.ChainedScheduler, which gives the same rates for schedules that
    multiply by a factor.
    """

    name: ClassVar[str] = "chained"

    def rate(self, base: float, progress: Progress) -> float:
        """The rate of the last schedule."""
        return reduce(lambda rate, part: part.rate(rate, progress), self.schedules, base)
