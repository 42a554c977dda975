"""The schedule ``polynomial``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core.component import number, setting
from ortflex_core.errors import ConfigError
from ortflex_core.protocols import Schedule
from ortflex_core.types import Progress


@attrs.frozen(kw_only=True)
class Polynomial(Schedule):
    """A polynomial down to zero: ``rate(t) = base·(1 − min(t, length) / length)^power``.

    Raises:
        ValueError: ``power`` or ``length`` is not positive.
        ConfigError: ``length`` is None and the length of the training is not known.

    >>> Polynomial(length=4).rate(0.5, Progress(step=2))
    0.25

    Source: torch.optim.lr_scheduler.PolynomialLR, whose length is 5 by default.
    """

    name: ClassVar[str] = "polynomial"

    length: float | None = setting(
        default=None,
        validator=attrs.validators.optional(number(gt=0)),
        help="the time until the rate is zero; None: the whole training",
    )
    power: float = setting(
        default=1.0, validator=number(gt=0), help="the exponent; 1 is a straight line"
    )

    def rate(self, base: float, progress: Progress) -> float:
        """The rate at ``t``."""
        length = self.duration(progress) if self.length is None else self.length
        if length is None:
            raise ConfigError(
                f"polynomial: length=None is the length of the training in units of {self.by!r}, "
                "which is not known for this data source; set length="
            )
        share = 1 - min(self.time(progress) / max(length, 1), 1)
        return float(base * share ** float(self.power))
