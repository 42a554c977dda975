"""The loss ``log_cosh``."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from ortflex_core.data import float_labels
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import TensorSpec


@attrs.frozen(kw_only=True)
class LogCosh(Loss):
    """Logarithm of the hyperbolic cosine of the error: ``log cosh(p − y)``.

    Labels have the prediction's shape, [B, …], and so have the values.

    Raises:
        DataError: labels of another shape, or not numbers.

    >>> LogCosh().describe()["name"]
    'log_cosh'

    Source: keras.losses.LogCosh before its mean.
    """

    name: ClassVar[str] = "log_cosh"

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the prediction's type and shape."""
        return float_labels(self.name, predicted, given)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``|e| + log(1 + exp(−2|e|)) − log 2``: nothing overflows."""
        size = op.Abs(predicted - expected)
        return size + op.Log(1 + op.Exp(-2 * size)) - math.log(2)
