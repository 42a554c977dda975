"""The optimizer ``adam``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from ortflex_core.component import hyper, number
from ortflex_core.ops import Ops, Tensor
from ortflex_core.protocols import Optimizer


@attrs.frozen(kw_only=True)
class Adam(Optimizer):
    """Adam; default rate 0.001.

    ``m ← beta1·m + (1 − beta1)·g``, ``v ← beta2·v + (1 − beta2)·g²``,
    ``w ← w − rate·m̂ / (√v̂ + eps)`` with ``m̂ = m / (1 − beta1ᵗ)``, ``v̂ = v / (1 − beta2ᵗ)``.

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
        self,
        op: Ops,
        weight: Tensor,
        gradient: Tensor,
        rate: Any,
        step: Any,
        slots: Mapping[str, Tensor],
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Both corrections are taken out of the tensors: numerator and denominator times c₂.

        The gradient is used once, times a scalar that a step graph can put into its seed. (The
        second scalar divides, because two that multiply would be made one again.)
        """
        root = op.Sqrt(1 - self.beta2)
        g = root * gradient
        m = self.beta1 * slots["m"] + g / (root / (1 - self.beta1))
        v = self.beta2 * slots["v"] + g * g
        c2 = op.Sqrt(1 - self.beta2**step)
        size = rate * c2 / (1 - self.beta1**step)
        return weight - size * (m / (op.Sqrt(v) + self.eps * c2)), {"m": m, "v": v}
