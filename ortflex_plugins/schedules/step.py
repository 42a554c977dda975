"""The schedule ``step``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, number, setting


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
