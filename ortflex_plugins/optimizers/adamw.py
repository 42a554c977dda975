"""The optimizer ``adamw``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay; default rate 0.001.

    ``w ← (1 − rate·weight_decay)·w − rate·m̂ / (√v̂ + eps)``, with Adam's slots m and v and its means m̂
    and v̂, which do not depend on the decay.

    Raises:
        ValueError: a beta is not in [0, 1), ``eps`` is not positive, or ``weight_decay`` is negative.

    >>> AdamW(weight_decay=0.1).describe()["weight_decay"]
    0.1

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization" (2019);
    torch.optim.AdamW.
    """

    name: ClassVar[str] = "adamw"
    default_rate: ClassVar[float] = 1e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    beta1: float = hyper(default=0.9, validator=number(ge=0, lt=1), help="decay of the mean of g")
    beta2: float = hyper(
        default=0.999, validator=number(ge=0, lt=1), help="decay of the mean of g²"
    )
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="added to √v̂")
    weight_decay: float = hyper(
        default=0.01,
        validator=number(ge=0),
        help="the fraction of w that a step removes, times rate",
    )

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """``(1 − rate·weight_decay)·w`` minus the move of Adam."""
        m = self.beta1 * slots["m"] + (1 - self.beta1) * gradient
        v = self.beta2 * slots["v"] + (1 - self.beta2) * gradient**2
        m_hat = m / (1 - self.beta1**step)
        v_hat = v / (1 - self.beta2**step)
        move = rate * m_hat / (op.Sqrt(v_hat) + self.eps)
        return (1 - rate * self.weight_decay) * weight - move, {"m": m, "v": v}
