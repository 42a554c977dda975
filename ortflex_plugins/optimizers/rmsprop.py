"""The optimizer ``rmsprop``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class RmsProp(Optimizer):
    """RMSprop, neither centered nor with momentum; default rate 0.01.

    ``v ← alpha·v + (1 − alpha)·g²``, ``w ← w − rate·g / (√v + eps)``. The slot v has the shape of w and
    starts at 0.

    Raises:
        ValueError: ``alpha`` is not in [0, 1), or ``eps`` is not positive.

    >>> RmsProp().describe()["alpha"]
    0.99

    Source: T. Tieleman and G. Hinton, lecture 6.5 (2012); torch.optim.RMSprop.
    """

    name: ClassVar[str] = "rmsprop"
    default_rate: ClassVar[float] = 1e-2
    slots: ClassVar[tuple[str, ...]] = ("v",)

    alpha: float = hyper(default=0.99, validator=number(ge=0, lt=1), help="decay of the mean of g²")
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="added to √v")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula."""
        v = self.alpha * slots["v"] + (1 - self.alpha) * (gradient * gradient)
        return weight - rate * (gradient / (op.Sqrt(v) + self.eps)), {"v": v}
