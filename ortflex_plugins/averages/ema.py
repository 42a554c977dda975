"""The average ``ema``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Average, Host, Ops, hyper, number


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
