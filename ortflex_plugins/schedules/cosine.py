"""The schedule ``cosine``."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, number, setting
from ortflex_plugins.schedules._length import known_length, length_field


@attrs.frozen(kw_only=True)
class Cosine(Schedule):
    """Half a cosine: ``rate(t) = minimum + ½ (base − minimum)·(1 + cos(π t / period))``.

    ``t`` and ``period`` are in the unit ``by``. After ``period`` the rate rises again, as in torch. If
    ``period`` is None, it is the length of the run.

    Raises:
        ValueError: ``minimum`` is negative, or ``period`` is not positive.
        ConfigError: ``period`` is None and the length of the run is unknown.

    >>> Cosine(period=100).rate(0.1, Progress(step=50))
    0.05

    Source: I. Loshchilov and F. Hutter, "SGDR: stochastic gradient descent with warm restarts"
    (2017), without restarts; torch.optim.lr_scheduler.CosineAnnealingLR.
    """

    name: ClassVar[str] = "cosine"
    aliases: ClassVar[tuple[str, ...]] = ("cosine_annealing", "cosine_annealing_lr", "cosine_decay")

    minimum: float = setting(default=0.0, validator=number(ge=0), help="the rate after a period")
    period: float | None = length_field("the time from base to minimum")

    def rate(self, base: float, progress: Progress) -> float:
        """The rate at ``t``."""
        period = known_length(self, "period", progress)
        factor = 0.5 * (1 + math.cos(math.pi * self.time(progress) / max(period, 1)))
        return self.minimum + (base - self.minimum) * factor
