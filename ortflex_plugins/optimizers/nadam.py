"""The optimizer ``nadam``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class NAdam(Optimizer):
    """Adam with Nesterov's momentum; default rate 0.002.

    ``μₜ = beta1·(1 − ½·0.96^(t·decay))``, ``Pₜ = Πᵢ μᵢ``, and
    ``w ← w − rate·((1 − μₜ)·g / (1 − Pₜ) + μₜ₊₁·m / (1 − Pₜ₊₁)) / (√v̂ + eps)``, where t is the step,
    counted from 1. The slots m and v and the mean v̂ are those of Adam; the slot ``q = 1 − Pₜ`` has the
    shape of w.

    Raises:
        ValueError: a beta is not in [0, 1), ``decay`` is negative, or ``eps`` is not positive.

    >>> NAdam().describe()["decay"]
    0.004

    Source: T. Dozat, "Incorporating Nesterov momentum into Adam" (2016); torch.optim.NAdam.
    """

    name: ClassVar[str] = "nadam"
    default_rate: ClassVar[float] = 2e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "v", "q")

    beta1: float = hyper(default=0.9, validator=number(ge=0, lt=1), help="decay of the mean of g")
    beta2: float = hyper(
        default=0.999, validator=number(ge=0, lt=1), help="decay of the mean of g²"
    )
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="added to the root")
    decay: float = hyper(default=0.004, validator=number(ge=0), help="how fast the momentum rises")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The slot is 1 − Pₜ and not Pₜ, because slots start at 0; the product has no closed form."""
        m = self.beta1 * slots["m"] + (1 - self.beta1) * gradient
        v = self.beta2 * slots["v"] + (1 - self.beta2) * (gradient * gradient)
        mu = self.beta1 * (1 - 0.5 * 0.96 ** (step * self.decay))
        next_mu = self.beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * self.decay))
        q = (1 - mu) + mu * slots["q"]
        next_q = (1 - next_mu) + next_mu * q
        root = op.Sqrt(v * (1 / (1 - self.beta2**step))) + self.eps
        move = (1 - mu) * (gradient / q) + next_mu * (m / next_q)
        return weight - rate * (move / root), {"m": m, "v": v, "q": q}
