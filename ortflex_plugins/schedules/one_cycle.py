"""The schedule ``one_cycle``."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, number, setting
from ortflex_plugins.schedules._length import known_length, length_field


@attrs.frozen(kw_only=True)
class OneCycle(Schedule):
    """A rise to ``base``, the largest rate, and a fall far below the first rate, both as half cosines.

    The rate rises from ``base / start_divisor`` to ``base`` at ``t = up·length − 1``, falls to
    ``base / (start_divisor·end_divisor)`` at ``t = length − 1``, and stays there. ``t`` and ``length`` are
    in the unit ``by``; if ``length`` is None, it is the length of the run.

    Raises:
        ValueError: ``up`` is not in (0, 1), or a divisor or ``length`` is not positive.
        ConfigError: ``length`` is None and the length of the run is unknown.

    >>> OneCycle(length=10, up=0.5).rate(0.5, Progress(step=4))
    0.5

    Source: L. Smith and N. Topin, "Super-convergence" (2019); torch.optim.lr_scheduler.OneCycleLR
    with two phases, without its cycle of the momentum.
    """

    name: ClassVar[str] = "one_cycle"
    aliases: ClassVar[tuple[str, ...]] = ("onecycle", "onecyclelr")

    length: float | None = length_field("the length of the cycle")
    up: float = setting(
        default=0.3,
        validator=number(gt=0, lt=1),
        help="the fraction of the length in which the rate rises",
    )
    start_divisor: float = setting(
        default=25.0, validator=number(gt=0), help="base divided by the first rate"
    )
    end_divisor: float = setting(
        default=1e4, validator=number(gt=0), help="the first rate divided by the last"
    )

    def rate(self, base: float, progress: Progress) -> float:
        """The rate at ``t``."""
        length = known_length(self, "length", progress)
        first = base / self.start_divisor
        top, end = self.up * length - 1, length - 1
        time = min(self.time(progress), end)
        if time <= top:
            return _between(first, base, time / top if top > 0 else 1.0)
        return _between(base, first / self.end_divisor, (time - top) / (end - top))


def _between(a: float, b: float, fraction: float) -> float:
    """The value at a fraction of the way on a half cosine from ``a`` to ``b``."""
    return b + (a - b) / 2 * (1 + math.cos(math.pi * fraction))
