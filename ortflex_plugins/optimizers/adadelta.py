"""The optimizer ``adadelta``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class Adadelta(Optimizer):
    """Adadelta; default rate 1.

    ``v ← rho·v + (1 − rho)·g²``, ``d = g·√(u + eps) / √(v + eps)``,
    ``u ← rho·u + (1 − rho)·d²``, ``w ← w − rate·d``. The slots u and v have the shape of w and start
    at 0.

    Raises:
        ValueError: ``rho`` is not in [0, 1), or ``eps`` is not positive.

    >>> Adadelta().describe()["rho"]
    0.9

    Source: M. Zeiler, "ADADELTA" (2012); torch.optim.Adadelta.
    """

    name: ClassVar[str] = "adadelta"
    default_rate: ClassVar[float] = 1.0
    slots: ClassVar[tuple[str, ...]] = ("v", "u")

    rho: float = hyper(default=0.9, validator=number(ge=0, lt=1), help="decay of both means")
    eps: float = hyper(default=1e-6, validator=number(gt=0), help="added under both roots")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula; the move depends on ``u`` of the step before."""
        v = self.rho * slots["v"] + (1 - self.rho) * (gradient * gradient)
        move = gradient * (op.Sqrt(slots["u"] + self.eps) / op.Sqrt(v + self.eps))
        u = self.rho * slots["u"] + (1 - self.rho) * (move * move)
        return weight - rate * move, {"v": v, "u": u}
