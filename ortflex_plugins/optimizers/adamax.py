"""The optimizer ``adamax``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class Adamax(Optimizer):
    """Adamax, Adam with the infinity norm; default rate 0.002.

    ``m ← beta1·m + (1 − beta1)·g``, ``u ← max(beta2·u, |g| + eps)``,
    ``w ← w − rate / (1 − beta1ᵗ) · m / u``, where t is the step, counted from 1. The slots m and u have
    the shape of w and start at 0.

    Raises:
        ValueError: a beta is not in [0, 1), or ``eps`` is not positive.

    >>> Adamax().describe()["beta2"]
    0.999

    Source: D. Kingma and J. Ba, "Adam" (2015), §7.1; torch.optim.Adamax.
    """

    name: ClassVar[str] = "adamax"
    default_rate: ClassVar[float] = 2e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "u")

    beta1: float = hyper(default=0.9, validator=number(ge=0, lt=1), help="decay of the mean of g")
    beta2: float = hyper(
        default=0.999, validator=number(ge=0, lt=1), help="decay of the largest |g|"
    )
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="added to |g|")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula."""
        m = self.beta1 * slots["m"] + (1 - self.beta1) * gradient
        u = op.Max(self.beta2 * slots["u"], op.Abs(gradient) + self.eps)
        return weight - (rate / (1 - self.beta1**step)) * (m / u), {"m": m, "u": u}
