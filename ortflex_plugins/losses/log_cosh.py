"""The loss ``log_cosh``."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor
from ortflex_plugins.losses._elementwise import ElementwiseLoss


@attrs.frozen(kw_only=True)
class LogCosh(ElementwiseLoss):
    """Logarithm of the hyperbolic cosine of the error: ``l = log cosh(p − y)``.

    Labels and values have the shape of the prediction, [B, …].

    Raises:
        DataError: the labels have another shape or are not numbers.

    >>> LogCosh().describe()
    {'name': 'log_cosh'}

    Source: keras.losses.LogCosh before its mean.
    """

    name: ClassVar[str] = "log_cosh"

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``|e| + log(1 + exp(−2|e|)) − log 2``, which cannot overflow."""
        size = op.Abs(predicted - expected)
        return size + op.Log(1 + op.Exp(-2 * size)) - math.log(2)
