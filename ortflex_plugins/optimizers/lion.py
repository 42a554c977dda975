"""The optimizer ``lion``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class Lion(Optimizer):
    """Lion, which moves each element by the sign of a momentum; default rate 0.0001.

    ``d = sign(beta1·m + (1 − beta1)·g)``, ``m ← beta2·m + (1 − beta2)·g``,
    ``w ← (1 − rate·weight_decay)·w − rate·d``. The slot m has the shape of w and starts at 0.

    Raises:
        ValueError: a beta is not in [0, 1), or ``weight_decay`` is negative.

    >>> Lion().describe()["beta2"]
    0.99

    Source: X. Chen et al., "Symbolic discovery of optimization algorithms" (2023), program 1.
    """

    name: ClassVar[str] = "lion"
    default_rate: ClassVar[float] = 1e-4
    slots: ClassVar[tuple[str, ...]] = ("m",)

    beta1: float = hyper(
        default=0.9, validator=number(ge=0, lt=1), help="fraction of m in the direction"
    )
    beta2: float = hyper(default=0.99, validator=number(ge=0, lt=1), help="decay of the mean of g")
    weight_decay: float = hyper(
        default=0.0,
        validator=number(ge=0),
        help="the fraction of w that a step removes, times rate",
    )

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula."""
        move = op.Sign(self.beta1 * slots["m"] + (1 - self.beta1) * gradient)
        m = self.beta2 * slots["m"] + (1 - self.beta2) * gradient
        return (1 - rate * self.weight_decay) * weight - rate * move, {"m": m}
