"""The schedule ``cosine``."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from ortflex_core.component import number, setting
from ortflex_core.errors import ConfigError
from ortflex_core.protocols import Schedule
from ortflex_core.types import Progress


@attrs.frozen(kw_only=True)
class Cosine(Schedule):
    """Half a cosine: ``rate(t) = minimum + ½ (base − minimum)·(1 + cos(π t / period))``.

    After ``period`` the rate rises again, as in torch. A period of None is the length of the training.

    Raises:
        ValueError: ``minimum`` is negative, or ``period`` is not positive.
        ConfigError: ``period`` is None and the length of the training is not known.

    >>> Cosine(period=100).rate(0.1, Progress(step=50))
    0.05

    Source: I. Loshchilov and F. Hutter, "SGDR: stochastic gradient descent with warm restarts"
    (2017), without restarts; torch.optim.lr_scheduler.CosineAnnealingLR.
    """

    name: ClassVar[str] = "cosine"
    aliases: ClassVar[tuple[str, ...]] = ("cosine_annealing",)

    minimum: float = setting(default=0.0, validator=number(ge=0), help="the rate after a period")
    period: float | None = setting(
        default=None,
        validator=attrs.validators.optional(number(gt=0)),
        help="the time from base to minimum; None: the whole training",
    )

    def rate(self, base: float, progress: Progress) -> float:
        """The rate at ``t``."""
        period = self.duration(progress) if self.period is None else self.period
        if period is None:
            raise ConfigError(
                f"cosine: period=None is the length of the training in units of {self.by!r}, "
                "which is not known for this data source; set period="
            )
        share = 0.5 * (1 + math.cos(math.pi * self.time(progress) / max(period, 1)))
        return self.minimum + (base - self.minimum) * share
