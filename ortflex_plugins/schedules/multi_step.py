"""The schedule ``multi_step``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, number, setting


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
