"""Schedules that multiply the rate by a factor: ``exponential``, ``step``, ``multi_step``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, number, setting


@attrs.frozen(kw_only=True)
class Exponential(Schedule):
    """A constant factor per unit of time: ``rate(t) = base·gammaᵗ``, with ``t`` in the unit ``by``.

    Raises:
        ValueError: ``gamma`` is not positive.

    >>> Exponential(by="epoch", gamma=0.5).rate(0.1, Progress(epoch=1))
    0.05

    Source: torch.optim.lr_scheduler.ExponentialLR, which counts epochs: ``by="epoch"``.
    """

    name: ClassVar[str] = "exponential"

    gamma: float = setting(default=0.99, validator=number(gt=0), help="factor per unit of time")

    def rate(self, base: float, progress: Progress) -> float:
        """``base·gammaᵗ``."""
        return float(base * float(self.gamma) ** self.time(progress))


@attrs.frozen(kw_only=True)
class StepDecay(Schedule):
    """A factor at equal intervals: ``rate(t) = base·gamma^⌊t / size⌋``.

    ``t`` and ``size`` are in the unit ``by``.

    Raises:
        ValueError: ``size`` or ``gamma`` is not positive.

    >>> StepDecay(by="epoch", size=10).rate(0.5, Progress(epoch=10))
    0.05

    Source: torch.optim.lr_scheduler.StepLR, which counts epochs: ``by="epoch"``.
    """

    name: ClassVar[str] = "step"

    size: float = setting(default=10, validator=number(gt=0), help="the length of an interval")
    gamma: float = setting(
        default=0.1, validator=number(gt=0), help="the factor from one interval to the next"
    )

    def rate(self, base: float, progress: Progress) -> float:
        """``base·gamma^⌊t / size⌋``."""
        return float(base * float(self.gamma) ** (self.time(progress) // self.size))


@attrs.frozen(kw_only=True)
class MultiStep(Schedule):
    """A factor at given times: ``rate(t) = base·gammaⁿ``, where n milestones are at most ``t``.

    ``t`` and the milestones are in the unit ``by``.

    Raises:
        ValueError: a milestone is negative, or ``gamma`` is not positive.

    >>> MultiStep(milestones=(3, 5), gamma=0.5).rate(0.8, Progress(step=4))
    0.4

    Source: torch.optim.lr_scheduler.MultiStepLR, which counts epochs: ``by="epoch"``.
    """

    name: ClassVar[str] = "multi_step"

    milestones: tuple[int, ...] = setting(
        converter=tuple,
        validator=attrs.validators.deep_iterable(number(ge=0)),
        help="the times at which the rate is multiplied",
    )
    gamma: float = setting(default=0.1, validator=number(gt=0), help="the factor at each milestone")

    def rate(self, base: float, progress: Progress) -> float:
        """The rate at ``t``."""
        time = self.time(progress)
        return float(base * float(self.gamma) ** sum(m <= time for m in self.milestones))
