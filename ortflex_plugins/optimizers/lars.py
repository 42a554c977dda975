"""The optimizer ``lars``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class Lars(Optimizer):
    """LARS: momentum with a separate rate for each tensor, which depends on its norm; default rate 1.

    ``d = g + weight_decay·w``, ``v ← beta·v + rate·local·d``, ``w ← w − v`` with
    ``local = trust·‖w‖ / (‖g‖ + weight_decay·‖w‖)``, or 1 if ``w`` or ``g`` is 0. Norms are Euclidean and
    of the whole tensor. v is the slot ``velocity``, which has the shape of w and starts at 0. Biases and
    scales usually get another optimizer (``groups``).

    Raises:
        ValueError: ``beta`` is not in [0, 1), ``trust`` is not positive, or ``weight_decay`` is negative.

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
        # Where both norms are 0, the quotient is 0/0 and is not used.
        local = op.Where(op.Greater(op.Min(size_w, size_g), 0.0), local, 1.0)
        move = (rate * local) * (gradient + self.weight_decay * weight)
        velocity = self.beta * slots["velocity"] + move
        return weight - velocity, {"velocity": velocity}


def _norm(op: Ops, tensor: Tensor) -> Tensor:
    """The Euclidean norm of all elements, of rank 0."""
    return op.Sqrt(op.ReduceSum(tensor * tensor, keepdims=0))
