"""The optimizer ``adagrad``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class Adagrad(Optimizer):
    """Adagrad; default rate 0.01.

    ``s ← s + g²``, ``w ← w − rate / (1 + (t − 1)·rate_decay) · g / (√s + eps)``, where t is the step,
    counted from 1. The slot s has the shape of w and starts at 0.

    Raises:
        ValueError: ``rate_decay`` is negative, or ``eps`` is not positive.

    >>> Adagrad().describe()["eps"]
    1e-10

    Source: J. Duchi et al., "Adaptive subgradient methods" (2011); torch.optim.Adagrad.
    """

    name: ClassVar[str] = "adagrad"
    default_rate: ClassVar[float] = 1e-2
    slots: ClassVar[tuple[str, ...]] = ("s",)

    rate_decay: float = hyper(
        default=0.0, validator=number(ge=0), help="the decay of the rate per step"
    )
    eps: float = hyper(default=1e-10, validator=number(gt=0), help="added to √s")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula; the decay of the rate is computed on the host."""
        s = slots["s"] + gradient * gradient
        size = rate / (1 + (step - 1) * self.rate_decay)
        return weight - size * (gradient / (op.Sqrt(s) + self.eps)), {"s": s}
