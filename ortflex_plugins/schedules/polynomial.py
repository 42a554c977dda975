"""The schedule ``polynomial``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, number, setting
from ortflex_plugins.schedules._length import known_length, length_field


@attrs.frozen(kw_only=True)
class Polynomial(Schedule):
    """A polynomial that falls to zero: ``rate(t) = base·(1 − min(t, length) / length)^power``.

    ``t`` and ``length`` are in the unit ``by``. If ``length`` is None, it is the length of the run.

    Raises:
        ValueError: ``power`` or ``length`` is not positive.
        ConfigError: ``length`` is None and the length of the run is unknown.

    >>> Polynomial(length=4).rate(0.5, Progress(step=2))
    0.25

    Source: torch.optim.lr_scheduler.PolynomialLR, whose length is 5 by default.
    """

    name: ClassVar[str] = "polynomial"

    length: float | None = length_field("the time until the rate is zero")
    power: float = setting(
        default=1.0, validator=number(gt=0), help="the exponent; 1 is a straight line"
    )

    def rate(self, base: float, progress: Progress) -> float:
        """The rate at ``t``."""
        length = known_length(self, "length", progress)
        remaining = 1 - min(self.time(progress) / max(length, 1), 1)
        return float(base * remaining ** float(self.power))
