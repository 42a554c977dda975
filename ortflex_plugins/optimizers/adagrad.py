"""Rates divided by the size of earlier gradients: ``adagrad``, ``rmsprop``, ``adadelta``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number
from ortflex_plugins.optimizers._fields import decay_rate


@attrs.frozen(kw_only=True)
class Adagrad(Optimizer):
    """Adagrad, with a default learning rate of 0.01.

    ``s ← s + g²``, ``w ← w − rate / (1 + (t − 1)·rate_decay) · g / (√s + eps)``, where t is the step,
    counted from 1. The optimizer state is the slot s, which has the shape of w and starts at 0.

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
        default=0.0, validator=number(ge=0), help="the decay of the learning rate per step"
    )
    eps: float = hyper(default=1e-10, validator=number(gt=0), help="the number added to √s")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula; the decay of the rate is computed on the host."""
        s = slots["s"] + gradient * gradient
        size = rate / (1 + (step - 1) * self.rate_decay)
        return weight - size * (gradient / (op.Sqrt(s) + self.eps)), {"s": s}


@attrs.frozen(kw_only=True)
class RmsProp(Optimizer):
    """RMSprop without centering or momentum, with a default learning rate of 0.01.

    ``v ← alpha·v + (1 − alpha)·g²``, ``w ← w − rate·g / (√v + eps)``. The optimizer state is the
    slot v, which has the shape of w and starts at 0.

    Raises:
        ValueError: ``alpha`` is not in [0, 1), or ``eps`` is not positive.

    >>> RmsProp().describe()["alpha"]
    0.99

    Source: T. Tieleman and G. Hinton, lecture 6.5 (2012); torch.optim.RMSprop.
    """

    name: ClassVar[str] = "rmsprop"
    default_rate: ClassVar[float] = 1e-2
    slots: ClassVar[tuple[str, ...]] = ("v",)

    alpha: float = decay_rate(0.99, "the moving average of g²")
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="the number added to √v")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        v = self.alpha * slots["v"] + (1 - self.alpha) * (gradient * gradient)
        return weight - rate * (gradient / (op.Sqrt(v) + self.eps)), {"v": v}


@attrs.frozen(kw_only=True)
class Adadelta(Optimizer):
    """Adadelta, with a default learning rate of 1.

    ``v ← rho·v + (1 − rho)·g²``, ``d = g·√(u + eps) / √(v + eps)``, ``u ← rho·u + (1 − rho)·d²``,
    ``w ← w − rate·d``. The optimizer state consists of the slots u and v, which have the shape of w and
    start at 0.

    Raises:
        ValueError: ``rho`` is not in [0, 1), or ``eps`` is not positive.

    >>> Adadelta().describe()["rho"]
    0.9

    Source: M. Zeiler, "ADADELTA" (2012); torch.optim.Adadelta.
    """

    name: ClassVar[str] = "adadelta"
    default_rate: ClassVar[float] = 1.0
    slots: ClassVar[tuple[str, ...]] = ("v", "u")

    rho: float = decay_rate(0.9, "both moving averages")
    eps: float = hyper(
        default=1e-6,
        validator=number(gt=0),
        help="the number added to u and v under the square roots",
    )

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula; the move depends on ``u`` of the step before."""
        v = self.rho * slots["v"] + (1 - self.rho) * (gradient * gradient)
        move = gradient * (op.Sqrt(slots["u"] + self.eps) / op.Sqrt(v + self.eps))
        u = self.rho * slots["u"] + (1 - self.rho) * (move * move)
        return weight - rate * move, {"v": v, "u": u}
