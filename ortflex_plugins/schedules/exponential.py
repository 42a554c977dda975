"""The schedule ``exponential``."""

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
