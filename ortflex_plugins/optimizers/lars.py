"""The optimizer ``lars``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core.component import hyper, number
from ortflex_core.graph import Host, Ops, Tensor
from ortflex_core.protocols import Optimizer, Slots, Updated


@attrs.frozen(kw_only=True)
class Lars(Optimizer):
    """LARS: momentum with a separate rate for each tensor, which depends on its norm; default rate 1.

    ``d = g + weight_decay·w``, ``v ← beta·v + rate·local·d``, ``w ← w − v`` with
    ``local = trust·‖w‖ / (‖g‖ + weight_decay·‖w‖)``, or 1 where ``w`` or ``g`` is 0. Norms are
    Euclidean, over the whole tensor. Biases and scales usually get another optimizer (``groups``).

    Raises:
        ValueError: ``beta`` is not in [0, 1), ``trust`` not positive, ``weight_decay`` negative.

    >>> Lars(trust=0.02).describe()["beta"]
    0.9

    Source: Y. You, I. Gitman and B. Ginsburg, "Large batch training of convolutional networks"
    (2017), algorithm 1.
    """

    name: ClassVar[str] = "lars"
    default_rate: ClassVar[float] = 1.0
    slots: ClassVar[tuple[str, ...]] = ("velocity",)
    elementwise: ClassVar[bool] = False

    beta: float = hyper(
        default=0.9, validator=number(ge=0, lt=1), help="the fraction of the velocity that is kept"
    )
    trust: float = hyper(
        default=1e-3, validator=number(gt=0), help="the norm of a step as a fraction of ‖w‖"
    )
    weight_decay: float = hyper(default=5e-4, validator=number(ge=0), help="fraction of w in d")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula."""
        size_w, size_g = _norm(op, weight), _norm(op, gradient)
        local = self.trust * size_w / (size_g + self.weight_decay * size_w)
        # 0/0 comes out of the division, and is not taken.
        local = op.Where(op.Greater(op.Min(size_w, size_g), 0.0), local, 1.0)
        moved = (rate * local) * (gradient + self.weight_decay * weight)
        velocity = self.beta * slots["velocity"] + moved
        return weight - velocity, {"velocity": velocity}


def _norm(op: Ops, tensor: Tensor) -> Tensor:
    """‖x‖ over all elements, of rank 0."""
    return op.Sqrt(op.ReduceSum(tensor * tensor, keepdims=0))
