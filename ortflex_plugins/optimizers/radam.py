"""The optimizer ``radam``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class RAdam(Optimizer):
    """Rectified Adam; default rate 0.001.

    With ``ρ∞ = 2 / (1 − beta2) − 1`` and ``ρ = ρ∞ − 2·t·beta2ᵗ / (1 − beta2ᵗ)``,
    ``w ← w − rate·m̂·r·√(1 − beta2ᵗ) / (√v + eps)`` if ``ρ > 5``, else ``w ← w − rate·m̂``, where
    ``r² = (ρ − 4)(ρ − 2)ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)ρ)``. t is the step, counted from 1; the slots m and v and
    the mean m̂ are those of Adam.

    Raises:
        ValueError: ``beta1`` is not in [0, 1), ``beta2`` is not in [0.7, 1), or ``eps`` is not positive.

    >>> RAdam().describe()["beta1"]
    0.9

    Source: L. Liu et al., "On the variance of the adaptive learning rate" (2020); torch.optim.RAdam.
    """

    name: ClassVar[str] = "radam"
    default_rate: ClassVar[float] = 1e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    beta1: float = hyper(default=0.9, validator=number(ge=0, lt=1), help="decay of the mean of g")
    beta2: float = hyper(
        default=0.999, validator=number(ge=0.7, lt=1), help="decay of the mean of g²"
    )
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="added to the root")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula; the branch is a factor 0 or 1 on the host, so every step has the same graph."""
        m = self.beta1 * slots["m"] + (1 - self.beta1) * gradient
        v = self.beta2 * slots["v"] + (1 - self.beta2) * (gradient * gradient)
        correction = 1 - self.beta2**step
        limit = 2 / (1 - self.beta2) - 1
        rho = limit - 2 * step * self.beta2**step / correction
        rectified = op.Min(op.Max(-op.Floor(5 - rho), 0.0), 1.0)  # 1 where rho > 5
        square = (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
        size = rate / (1 - self.beta1**step)
        adaptive = size * rectified * op.Sqrt(op.Max(square, 0.0)) * op.Sqrt(correction)
        plain = size * (1 - rectified)
        return weight - m * (adaptive / (op.Sqrt(v) + self.eps) + plain), {"m": m, "v": v}
