"""The loss ``huber``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor, hyper, number
from ortflex_plugins.losses._elementwise import ElementwiseLoss


@attrs.frozen(kw_only=True)
class Huber(ElementwiseLoss):
    """Huber loss: ``l = ½ e²`` where ``|e| ≤ delta``, else ``delta·(|e| − ½ delta)``; ``e = p − y``.

    Labels and values have the shape of the prediction, [B, …].

    Raises:
        ValueError: ``delta`` is not positive.
        DataError: the labels have another shape or are not numbers.

    >>> Huber(delta=0.5).describe()
    {'name': 'huber', 'delta': 0.5}

    Source: P. J. Huber, "Robust estimation of a location parameter" (1964); torch.nn.HuberLoss.
    """

    name: ClassVar[str] = "huber"
    aliases: ClassVar[tuple[str, ...]] = ("smooth_l1",)

    delta: float = hyper(
        default=1.0, validator=number(gt=0), help="the error from which the loss is linear"
    )

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``c·(e − ½ c)`` with ``c = clip(e, −delta, delta)``: both branches in one."""
        error = predicted - expected
        inside = op.Clip(error, -self.delta, self.delta)
        return inside * (error - 0.5 * inside)

    def gradient(
        self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor
    ) -> Tensor | None:
        """``clip(e, −delta, delta)``; the derivative of the formula has five nodes more."""
        return op.Clip(predicted - expected, -self.delta, self.delta) * cotangent
