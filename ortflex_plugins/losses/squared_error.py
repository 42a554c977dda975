"""The loss ``squared_error``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor
from ortflex_plugins.losses._elementwise import ElementwiseLoss


@attrs.frozen(kw_only=True)
class SquaredError(ElementwiseLoss):
    """Squared error: ``l = (p − y)²``, without the factor ½.

    Labels and values have the shape of the prediction, [B, …].

    Raises:
        DataError: the labels have another shape or are not numbers.

    >>> SquaredError().describe()
    {'name': 'squared_error'}

    Source: torch.nn.MSELoss before its reduction; scikit-learn's is ½ (p − y)².
    """

    name: ClassVar[str] = "squared_error"
    aliases: ClassVar[tuple[str, ...]] = ("mse", "mean_squared_error", "l2_loss")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``(p − y)²``."""
        error = predicted - expected
        return error * error
