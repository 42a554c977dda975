"""The loss ``absolute_error``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor
from ortflex_plugins.losses._elementwise import ElementwiseLoss


@attrs.frozen(kw_only=True)
class AbsoluteError(ElementwiseLoss):
    """Absolute error: ``l = |p − y|``. Its gradient at ``p = y`` is 0.

    Labels and values have the shape of the prediction, [B, …].

    Raises:
        DataError: the labels have another shape or are not numbers.

    >>> AbsoluteError().describe()
    {'name': 'absolute_error'}

    Source: torch.nn.L1Loss before its reduction.
    """

    name: ClassVar[str] = "absolute_error"
    aliases: ClassVar[tuple[str, ...]] = ("mae", "mean_absolute_error", "l1_loss")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``|p − y|``."""
        return abs(predicted - expected)
