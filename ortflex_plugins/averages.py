"""Averages, means of the weights over the steps: ``ema``, ``swa``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Average, Host, Ops, hyper, number

__path__: list[str] = []  # Import paths of 0.2, such as averages.ema, are modules inside.


@attrs.frozen(kw_only=True)
class Ema(Average):
    """Exponential moving average: ``a₁ = w₁``, ``aₜ = decay·aₜ₋₁ + (1 − decay)·wₜ`` at step t.

    Raises:
        ValueError: ``decay`` is not in [0, 1).

    >>> Ema(decay=0.99).describe()
    {'name': 'ema', 'decay': 0.99}

    Source: B. Polyak and A. Juditsky, "Acceleration of stochastic approximation by averaging"
    (1992); ``torch.optim.swa_utils.get_ema_multi_avg_fn``.
    """

    name: ClassVar[str] = "ema"

    decay: float = hyper(
        default=0.999,
        validator=number(ge=0, lt=1),
        help="the factor by which the previous average is multiplied",
    )

    def share(self, op: Ops, step: Host) -> Host:
        """1 at the first step and 1 − decay afterwards."""
        return 1 - self.decay * op.Min(step - 1, 1.0)


@attrs.frozen(kw_only=True)
class Swa(Average):
    """Stochastic weight averaging: the mean of the weights after selected steps.

    The selected steps are ``start``, ``start + every``, ``start + 2·every`` and so on, counted from 1.
    Before the first of them, the average equals the current weights. With 600 steps per epoch,
    ``Swa(start=6000, every=600)`` averages the weights at the end of epoch 10 and of every later epoch.

    Raises:
        ValueError: ``start`` or ``every`` is less than 1.

    >>> Swa(start=100, every=10).describe()
    {'name': 'swa', 'start': 100, 'every': 10}

    Source: P. Izmailov et al., "Averaging weights leads to wider optima and better generalization"
    (UAI 2018); ``torch.optim.swa_utils.AveragedModel``.
    """

    name: ClassVar[str] = "swa"

    start: float = hyper(default=1, validator=number(ge=1), help="the first of the selected steps")
    every: float = hyper(
        default=1,
        validator=number(ge=1),
        help="the number of steps from one selected step to the next",
    )

    def share(self, op: Ops, step: Host) -> Host:
        """1/n at the n-th averaged step, 0 at the steps between, and 1 before the first averaged step."""
        past = op.Floor((step - self.start) / self.every)
        counts = past - op.Floor((step - 1 - self.start) / self.every)
        early = op.Min(op.Max(self.start - step, 0.0), 1.0)
        return op.Max(counts / (op.Max(past, 0.0) + 1), early)
