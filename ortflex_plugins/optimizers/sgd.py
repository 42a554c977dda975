"""The optimizer ``sgd``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, number, setting


@attrs.frozen(kw_only=True)
class Sgd(Optimizer):
    """Stochastic gradient descent: ``w ← w − rate·(g + weight_decay·w)``; default rate 0.001.

    It has no slots. Unlike a penalty, ``weight_decay`` is not part of the loss, and transforms such as
    clipping do not change it.

    Raises:
        ValueError: ``weight_decay`` is negative.

    >>> Sgd(weight_decay=0.01).describe()
    {'name': 'sgd', 'weight_decay': 0.01}

    Source: H. Robbins and S. Monro, "A stochastic approximation method" (1951);
    torch.optim.SGD(weight_decay=…).
    """

    name: ClassVar[str] = "sgd"
    default_rate: ClassVar[float] = 1e-3

    # A constant of the graph, because a hyperparameter would cost a product per weight, even at 0.
    weight_decay: float = setting(
        default=0.0, validator=number(ge=0), help="fraction of w in the gradient"
    )

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """``(1 − rate·weight_decay)·w − rate·g``, in which the gradient is only scaled."""
        if self.weight_decay:
            weight = (1 - rate * self.weight_decay) * weight
        return weight - rate * gradient, {}
