"""The loss ``absolute_error``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core.data import float_labels
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import TensorSpec


@attrs.frozen(kw_only=True)
class AbsoluteError(Loss):
    """Absolute error: ``l = |p − y|``; its gradient at ``p = y`` is 0.

    Labels have the prediction's shape, [B, …], and so have the values.

    Raises:
        DataError: labels of another shape, or not numbers (from :meth:`label`).

    >>> AbsoluteError().describe()
    {'name': 'absolute_error'}

    Source: torch.nn.L1Loss before its reduction.
    """

    name: ClassVar[str] = "absolute_error"
    aliases: ClassVar[tuple[str, ...]] = ("mae", "mean_absolute_error", "l1_loss")

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the prediction's type and shape."""
        return float_labels(self.name, predicted, given)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``|p − y|``."""
        return abs(predicted - expected)
