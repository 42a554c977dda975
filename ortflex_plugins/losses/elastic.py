"""The loss ``elastic``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core.component import hyper, number
from ortflex_core.data import float_labels
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import TensorSpec


@attrs.frozen(kw_only=True)
class Elastic(Loss):
    """Absolute and squared error mixed: ``l = l1_weight·|p − y| + l2_weight·(p − y)²``.

    Labels have the prediction's shape, [B, …], and so have the values.

    Raises:
        ValueError: a weight is negative.
        DataError: labels of another shape, or not numbers (from :meth:`label`).

    >>> Elastic(l1_weight=0.1).describe()
    {'name': 'elastic', 'l1_weight': 0.1, 'l2_weight': 0.5}

    Source: the elastic loss of onnxcustom, the older package.
    """

    name: ClassVar[str] = "elastic"

    l1_weight: float = hyper(default=0.5, validator=number(ge=0), help="weight of |p − y|")
    l2_weight: float = hyper(default=0.5, validator=number(ge=0), help="weight of (p − y)²")

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the prediction's type and shape."""
        return float_labels(self.name, predicted, given)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``l1_weight·|e| + l2_weight·e²`` with ``e = p − y``."""
        error = predicted - expected
        return self.l1_weight * op.Abs(error) + self.l2_weight * (error * error)
