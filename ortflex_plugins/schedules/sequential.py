"""Schedules that are made of others: ``warmup``, ``sequential``, ``chained``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar

import attrs

from ortflex_core import ConfigError, Progress, Schedule, ScheduleContext, Unit, number, setting
from ortflex_plugins.schedules.decay import Constant


def _check(instance: Any, attribute: attrs.Attribute[Any], value: Sequence[Any]) -> None:
    where = f"{type(instance).__name__}.{attribute.name}"
    if not value:
        raise ValueError(f"{where} must be at least one schedule, got none")
    for schedule in value:
        if not isinstance(schedule, Schedule):
            raise TypeError(f"{where} must be schedules, got {schedule!r}")
        same_unit(instance, schedule)


def same_unit(composition: Schedule, part: Schedule) -> None:
    """Refuse a part that counts by another unit than the composition.

    Raises:
        ConfigError: names the two units.
    """
    if part.by != composition.by:
        raise ConfigError(
            f"{composition.name} counts by {composition.by!r} and its schedule {part.name!r} by "
            f"{part.by!r}; use the same by= for both"
        )


def since(by: Unit, progress: Progress, start: int, end: int | None, total: int | None) -> Progress:
    """The progress for a part that begins at ``start`` and ends at ``end``, None for the end of the run.

    Before ``start``, its time is 0. ``total`` is the length of the run, or None if it is unknown.
    """
    until = total if end is None else end
    length = None if until is None else max(0, until - start)
    # The length in steps or rows is a number per epoch times the epochs: here it is one epoch.
    epochs = progress.epochs if length is None else 1
    if by == "step":
        time = max(0, progress.step - start)
        return attrs.evolve(progress, step=time, steps_per_epoch=length, epochs=epochs)
    if by == "rows":
        time = max(0, progress.rows - start)
        return attrs.evolve(progress, rows=time, rows_per_epoch=length, epochs=epochs)
    time = max(0, progress.epoch - start)
    return attrs.evolve(progress, epoch=time, epochs=length, history=progress.history[start:])


@attrs.frozen(kw_only=True)
class Warmup(Schedule):
    """Linear warmup to the initial learning rate of another schedule, which then takes over.

    ``rate(t) = (start + (1 − start)·t / length)·next(0)`` for ``t < length``, then
    ``next(t − length)``. Here, ``next`` is the learning rate of ``schedule``, the schedule that follows
    the warmup. A schedule without a length of its own lasts for the rest of the run. Both schedules and
    ``length`` must use the same unit of time.

    Raises:
        ValueError: ``length`` is not a whole number above 0, or ``start`` is not in [0, 1].
        TypeError: ``schedule`` is not a schedule.
        ConfigError: the two count by different units.

    >>> Warmup(length=4, start=0.5).rate(0.1, Progress(step=2))
    0.07500000000000001

    Source: P. Goyal et al., "Accurate, large minibatch SGD" (2017), §2.2;
    torch.optim.lr_scheduler.LinearLR, followed by another schedule through SequentialLR.
    """

    name: ClassVar[str] = "warmup"

    schedule: Schedule = setting(help="the schedule that follows the warmup")
    length: int = setting(default=5, validator=number(ge=1), help="the length of the warmup")
    start: float = setting(
        default=1 / 3,
        validator=number(ge=0, le=1),
        help="the initial learning rate of the warmup divided by its final learning rate",
    )

    @schedule.default
    def _constant(self) -> Schedule:
        return Constant(by=self.by)

    @schedule.validator
    def _check_schedule(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, Schedule):
            raise TypeError(f"Warmup.schedule must be a schedule, got {value!r}")
        same_unit(self, value)

    @length.validator
    def _check_length(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value != int(value):
            raise ValueError(f"Warmup.length must be a whole number, got {value!r}")

    def bind(self, context: ScheduleContext) -> Schedule:
        """The schedule with its inner schedule bound."""
        return attrs.evolve(self, schedule=self.schedule.bind(context))

    def rate(self, base: float, progress: Progress) -> float:
        time = self.time(progress)
        inner = since(self.by, progress, int(self.length), None, self.duration(progress))
        later = self.schedule.rate(base, inner)
        if time >= self.length:
            return later
        return later * (self.start + (1 - self.start) * time / self.length)


@attrs.frozen(kw_only=True)
class _Composition(Schedule):
    """What the family shares: its parts, which count in one unit."""

    schedules: tuple[Schedule, ...] = setting(
        converter=tuple,
        validator=_check,
        help="the schedules; each is a name, or a table with ``name`` and the parameters",
    )

    def bind(self, context: ScheduleContext) -> Schedule:
        """The schedule with its parts bound."""
        return attrs.evolve(self, schedules=tuple(s.bind(context) for s in self.schedules))


@attrs.frozen(kw_only=True)
class Sequential(_Composition):
    """Runs schedules in sequence: schedule k applies from ``milestones[k − 1]`` to ``milestones[k]``.

    The time of each schedule starts at 0, and a schedule without a length of its own lasts until the
    next one begins. All schedules and the milestones must use the same unit of time.

    Raises:
        ValueError: the number of milestones is not the number of schedules − 1, a milestone is not
            positive, or the milestones do not rise.
        TypeError: an item of ``schedules`` is not a schedule.
        ConfigError: a schedule counts by another unit.

    >>> from ortflex_plugins.schedules.cosine import Cosine
    >>> from ortflex_plugins.schedules.sequential import Warmup
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
    """Combines schedules, each of which is applied to the learning rate that the previous one computes.

    If all schedules multiply the learning rate by a factor, the result is the base learning rate
    times the product of the factors. All schedules must use the same unit of time.

    Raises:
        ValueError: ``schedules`` is empty.
        TypeError: an item of ``schedules`` is not a schedule.
        ConfigError: a schedule counts by another unit.

    >>> from ortflex_plugins.schedules.decay import Exponential, StepDecay
    >>> chain = Chained(schedules=(Exponential(gamma=0.5), StepDecay(size=2, gamma=0.5)))
    >>> [chain.rate(1.0, Progress(step=t)) for t in range(4)]
    [1.0, 0.5, 0.125, 0.0625]

    Source: torch.optim.lr_scheduler.ChainedScheduler, which yields the same learning rates if
    each schedule multiplies the learning rate by a factor.
    """

    name: ClassVar[str] = "chained"

    def rate(self, base: float, progress: Progress) -> float:
        """The rate of the last schedule."""
        return reduce(lambda rate, part: part.rate(rate, progress), self.schedules, base)
