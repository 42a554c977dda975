"""Half cosines: ``cosine``, ``cosine_restarts``, ``one_cycle``."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, number, setting
from ortflex_plugins.schedules.decay import known_length, length_field


@attrs.frozen(kw_only=True)
class Cosine(Schedule):
    """Cosine annealing: ``rate(t) = minimum + ½ (base − minimum)·(1 + cos(π t / period))``.

    ``t`` and ``period`` are in the unit ``by``. By default, the period is the length of the run. With a
    shorter period, the learning rate rises again after ``period``, as in torch.

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

    minimum: float = setting(
        default=0.0, validator=number(ge=0), help="the learning rate at the end of the period"
    )
    period: float | None = length_field(
        "the time in which the learning rate falls from its base value to the minimum"
    )

    def rate(self, base: float, progress: Progress) -> float:
        period = known_length(self, "period", progress)
        factor = 0.5 * (1 + math.cos(math.pi * self.time(progress) / max(period, 1)))
        return self.minimum + (base - self.minimum) * factor


@attrs.frozen(kw_only=True)
class CosineRestarts(Schedule):
    """Cosine annealing with warm restarts: ``minimum + (base − minimum)·½(1 + cos(π·s / T))``.

    ``T`` is the length of the current cycle: ``period`` for the first cycle, ``period·factor`` for the
    second, ``period·factor²`` for the third, and so on. ``s`` is the time since the last restart. All
    times are in the unit ``by``.

    Raises:
        ValueError: ``period`` is not positive, ``factor`` is below 1, or ``minimum`` is negative.

    >>> CosineRestarts(period=4).rate(0.5, Progress(step=4))
    0.5

    Source: I. Loshchilov and F. Hutter, "SGDR" (2017);
    torch.optim.lr_scheduler.CosineAnnealingWarmRestarts.
    """

    name: ClassVar[str] = "cosine_restarts"

    period: int = setting(default=10, validator=number(ge=1), help="the length of the first cycle")
    factor: int = setting(
        default=1,
        validator=number(ge=1),
        help="the length of each cycle divided by the length of the previous one",
    )
    minimum: float = setting(
        default=0.0, validator=number(ge=0), help="the learning rate just before a restart"
    )

    def rate(self, base: float, progress: Progress) -> float:
        since, period = float(self.time(progress)), float(self.period)
        if self.factor == 1:
            since %= period
        while since >= period:
            since -= period
            period *= self.factor
        return self.minimum + (base - self.minimum) * 0.5 * (1 + math.cos(math.pi * since / period))


@attrs.frozen(kw_only=True)
class OneCycle(Schedule):
    """One cycle: a rise to the base learning rate, then a fall far below the initial learning rate.

    The learning rate rises from ``base / start_divisor`` to ``base`` at ``t = up·length − 1``, falls to
    ``base / (start_divisor·end_divisor)`` at ``t = length − 1``, and stays there. Both the rise and the
    fall are half cosines. ``t`` and ``length`` are in the unit ``by``. By default, ``length`` is
    the length of the run.

    Raises:
        ValueError: ``up`` is not in (0, 1), or a divisor or ``length`` is not positive.
        ConfigError: ``length`` is None and the length of the run is unknown.

    >>> OneCycle(length=10, up=0.5).rate(0.5, Progress(step=4))
    0.5

    Source: L. Smith and N. Topin, "Super-convergence" (2019); torch.optim.lr_scheduler.OneCycleLR with
    two phases, but without its momentum cycle.
    """

    name: ClassVar[str] = "one_cycle"
    aliases: ClassVar[tuple[str, ...]] = ("onecycle", "onecyclelr")

    length: float | None = length_field("the length of the cycle")
    up: float = setting(
        default=0.3,
        validator=number(gt=0, lt=1),
        help="the fraction of the length during which the learning rate rises",
    )
    start_divisor: float = setting(
        default=25.0,
        validator=number(gt=0),
        help="the base learning rate divided by the initial learning rate",
    )
    end_divisor: float = setting(
        default=1e4,
        validator=number(gt=0),
        help="the initial learning rate divided by the final learning rate",
    )

    def rate(self, base: float, progress: Progress) -> float:
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
