"""The loss ``elastic``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor, hyper, number
from ortflex_plugins.losses._elementwise import ElementwiseLoss


@attrs.frozen(kw_only=True)
class Elastic(ElementwiseLoss):
    """A sum of absolute and squared error: ``l = l1_weight·|p − y| + l2_weight·(p − y)²``.

    Labels and values have the shape of the prediction, [B, …].

    Raises:
        ValueError: a weight is negative.
        DataError: the labels have another shape or are not numbers.

    >>> Elastic(l1_weight=0.1).describe()
    {'name': 'elastic', 'l1_weight': 0.1, 'l2_weight': 0.5}

    Source: the loss ``elastic`` of onnxcustom.
    """

    name: ClassVar[str] = "elastic"

    l1_weight: float = hyper(default=0.5, validator=number(ge=0), help="weight of |p − y|")
    l2_weight: float = hyper(default=0.5, validator=number(ge=0), help="weight of (p − y)²")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``l1_weight·|e| + l2_weight·e²`` with ``e = p − y``."""
        error = predicted - expected
        return self.l1_weight * op.Abs(error) + self.l2_weight * (error * error)
