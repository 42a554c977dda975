"""The loss ``quantile``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core.component import hyper, number
from ortflex_core.data import float_labels
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import TensorSpec


@attrs.frozen(kw_only=True)
class Quantile(Loss):
    """Quantile (pinball) loss: ``max(q·(y − p), (q − 1)·(y − p))``.

    Labels have the prediction's shape, [B, …], and so have the values.

    Raises:
        ValueError: ``quantile`` is not in (0, 1).
        DataError: labels of another shape, or not numbers.

    >>> Quantile().describe()["name"]
    'quantile'

    Source: sklearn.metrics.mean_pinball_loss before its mean.
    """

    name: ClassVar[str] = "quantile"
    aliases: ClassVar[tuple[str, ...]] = ("pinball",)

    quantile: float = hyper(
        default=0.5, validator=number(gt=0, lt=1), help="the quantile to predict"
    )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the prediction's type and shape."""
        return float_labels(self.name, predicted, given)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""
        error = expected - predicted
        return op.Max(self.quantile * error, (self.quantile - 1) * error)
