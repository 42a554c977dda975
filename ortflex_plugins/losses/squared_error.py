"""The loss ``squared_error``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core.data import float_labels
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import TensorSpec


@attrs.frozen(kw_only=True)
class SquaredError(Loss):
    """Squared error: ``l = (p − y)²``, without the factor ½.

    Labels have the prediction's shape, [B, …], and so have the values.

    Raises:
        DataError: labels of another shape, or not numbers (from :meth:`label`).

    >>> SquaredError().describe()
    {'name': 'squared_error'}

    Source: torch.nn.MSELoss before its reduction; scikit-learn's is ½ (p − y)².
    """

    name: ClassVar[str] = "squared_error"
    aliases: ClassVar[tuple[str, ...]] = ("mse", "mean_squared_error", "l2_loss")

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the prediction's type and shape."""
        return float_labels(self.name, predicted, given)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``(p − y)²``."""
        error = predicted - expected
        return error * error
