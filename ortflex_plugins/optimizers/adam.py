"""The optimizer ``adam``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class Adam(Optimizer):
    """Adam; default rate 0.001.

    ``m ← beta1·m + (1 − beta1)·g``, ``v ← beta2·v + (1 − beta2)·g²``,
    ``w ← w − rate·m̂ / (√v̂ + eps)`` with ``m̂ = m / (1 − beta1ᵗ)``, ``v̂ = v / (1 − beta2ᵗ)``, where t
    is the step, counted from 1. The slots m and v have the shape of w and start at 0.

    Raises:
        ValueError: a beta is not in [0, 1), or ``eps`` is not positive.

    >>> Adam(beta2=0.99).describe()
    {'name': 'adam', 'beta1': 0.9, 'beta2': 0.99, 'eps': 1e-08}

    Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization" (2015);
    torch.optim.Adam.
    """

    name: ClassVar[str] = "adam"
    default_rate: ClassVar[float] = 1e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    beta1: float = hyper(default=0.9, validator=number(ge=0, lt=1), help="decay of the mean of g")
    beta2: float = hyper(
        default=0.999, validator=number(ge=0, lt=1), help="decay of the mean of g²"
    )
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="added to √v̂")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula."""
        m = self.beta1 * slots["m"] + (1 - self.beta1) * gradient
        v = self.beta2 * slots["v"] + (1 - self.beta2) * gradient**2
        m_hat = m / (1 - self.beta1**step)
        v_hat = v / (1 - self.beta2**step)
        return weight - rate * m_hat / (op.Sqrt(v_hat) + self.eps), {"m": m, "v": v}
