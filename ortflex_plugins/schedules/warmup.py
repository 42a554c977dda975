"""The schedule ``warmup``."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from ortflex_core import Progress, Schedule, ScheduleContext, number, setting
from ortflex_plugins.schedules._composition import same_unit, since
from ortflex_plugins.schedules.constant import Constant


@attrs.frozen(kw_only=True)
class Warmup(Schedule):
    """A linear rise to the first rate of another schedule, which then starts.

    ``rate(t) = (start + (1 − start)·t / length)·inner(0)`` for ``t < length``, then
    ``inner(t − length)``. If the length of the inner schedule is that of the training, it is the rest of
    the training. Both must count in the same unit, which is that of ``length``.

    Raises:
        ValueError: ``length`` is not a whole number above 0, or ``start`` is not in [0, 1].
        TypeError: ``schedule`` is not a schedule.
        ConfigError: the two count by different units.

    >>> Warmup(length=4, start=0.5).rate(0.1, Progress(step=2))
    0.07500000000000001

    Source: P. Goyal et al., "Accurate, large minibatch SGD" (2017), §2.2;
    torch.optim.lr_scheduler.LinearLR followed by another through SequentialLR.
    """

    name: ClassVar[str] = "warmup"

    schedule: Schedule = setting(help="the schedule after the warm-up")
    length: int = setting(default=5, validator=number(ge=1), help="the length of the warm-up")
    start: float = setting(
        default=1 / 3, validator=number(ge=0, le=1), help="the fraction of the rate at t = 0"
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
        """The rate at ``t``."""
        time = self.time(progress)
        inner = since(self.by, progress, int(self.length), None, self.duration(progress))
        later = self.schedule.rate(base, inner)
        if time >= self.length:
            return later
        return later * (self.start + (1 - self.start) * time / self.length)
