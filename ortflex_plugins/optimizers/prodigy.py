"""The optimizer ``prodigy``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number
from ortflex_plugins.optimizers._fields import decay_rate


@attrs.frozen(kw_only=True)
class Prodigy(Optimizer):
    """Prodigy is Adam with an estimated step size d; its default learning rate is 1.

    All weights share the scalars d and r, unless you use parameter groups, in which case each group
    has its own d and r. Let w₀ be the weight before the first step, let β₃ = √beta2, and let each
    sum run over all elements of all weights that share d. Then ``d ← max(d0, d, r / Σ|s|)``,
    ``r ← β₃·r + (1 − β₃)·rate·d²·Σ g·(w₀ − w)``, and for every weight
    ``s ← β₃·s + (1 − β₃)·rate·d²·g``, ``m ← beta1·m + (1 − beta1)·d·g``,
    ``v ← beta2·v + (1 − beta2)·d²·g²``, ``w ← w − rate·d·m / (√v + d·eps)``. The slots m, v, s and
    ``start`` (w₀) have the shape of w.

    Because Prodigy estimates d, you do not have to search for a learning rate. Leave it at 1, or use a
    schedule that starts at 1.

    Raises:
        ValueError: a beta is not in [0, 1), or ``eps`` or ``d0`` is not positive.

    >>> Prodigy(d0=1e-4).describe()
    {'name': 'prodigy', 'beta1': 0.9, 'beta2': 0.999, 'eps': 1e-08, 'd0': 0.0001}

    Source: K. Mishchenko and A. Defazio, "Prodigy: an expeditiously adaptive parameter-free
    learner" (2023), algorithm 4.
    """

    name: ClassVar[str] = "prodigy"
    default_rate: ClassVar[float] = 1.0
    slots: ClassVar[tuple[str, ...]] = ("m", "v", "s", "start")
    shared: ClassVar[tuple[str, ...]] = ("d", "r")
    elementwise: ClassVar[bool] = False

    beta1: float = decay_rate(0.9, "the moving average of d·g")
    beta2: float = decay_rate(0.999, "the moving average of d²·g²")
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="d·eps is added to √v")
    d0: float = hyper(
        default=1e-6, validator=number(gt=0), help="the initial value of d, which never decreases"
    )

    def update_shared(
        self,
        op: Ops,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        rate: Host,
        step: Host,
        slots: Sequence[Slots],
        shared: Slots,
    ) -> Slots:
        """D from r and s of the step before, which the paper computes at the end of that step; then r."""
        root = self.beta2**0.5
        sizes = [op.ReduceSum(op.Abs(own["s"]), keepdims=0) for own in slots]
        products = [
            op.ReduceSum(g * (_start(op, w, step, own) - w), keepdims=0)
            for w, g, own in zip(weights, gradients, slots, strict=True)
        ]
        size = op.Sum(*sizes)
        # Before the second step both are 0, and the quotient is not used.
        estimate = op.Where(op.Greater(size, 0.0), shared["r"] / size, 0.0)
        d = op.Max(shared["d"], estimate, self.d0)
        r = root * shared["r"] + ((1 - root) * rate) * (d * d * op.Sum(*products))
        return {"d": d, "r": r}

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        root, d = self.beta2**0.5, slots["d"]
        scaled = d * gradient
        m = self.beta1 * slots["m"] + (1 - self.beta1) * scaled
        v = self.beta2 * slots["v"] + (1 - self.beta2) * (scaled * scaled)
        s = root * slots["s"] + ((1 - root) * rate * d) * scaled
        new = weight - (rate * d) * m / (op.Sqrt(v) + self.eps * d)
        return new, {"m": m, "v": v, "s": s, "start": _start(op, weight, step, slots)}


def _start(op: Ops, weight: Tensor, step: Host, slots: Slots) -> Tensor:
    """The weight before the first step; in that step, when its slot is still 0, the weight itself."""
    first = op.Max(2 - step, 0.0)
    return slots["start"] + first * weight
