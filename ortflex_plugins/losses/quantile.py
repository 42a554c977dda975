"""The loss ``quantile``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor, hyper, number
from ortflex_plugins.losses._elementwise import ElementwiseLoss


@attrs.frozen(kw_only=True)
class Quantile(ElementwiseLoss):
    """Quantile (pinball) loss: ``l = max(q·(y − p), (q − 1)·(y − p))``.

    Labels and values have the shape of the prediction, [B, …].

    Raises:
        ValueError: ``quantile`` is not in (0, 1).
        DataError: the labels have another shape or are not numbers.

    >>> Quantile(quantile=0.9).describe()
    {'name': 'quantile', 'quantile': 0.9}

    Source: sklearn.metrics.mean_pinball_loss before its mean.
    """

    name: ClassVar[str] = "quantile"
    aliases: ClassVar[tuple[str, ...]] = ("pinball",)

    quantile: float = hyper(
        default=0.5, validator=number(gt=0, lt=1), help="the quantile to predict"
    )

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""
        error = expected - predicted
        return op.Max(self.quantile * error, (self.quantile - 1) * error)
