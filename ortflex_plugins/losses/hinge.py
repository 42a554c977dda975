"""The loss ``hinge``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core.data import float_labels, require_range
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import Array, TensorSpec


@attrs.frozen(kw_only=True)
class Hinge(Loss):
    """Hinge loss of raw scores: ``max(0, 1 − y·s)``.

    Labels are −1 or 1, of the scores' shape [B, …].

    Raises:
        DataError: labels of another shape, outside their range, or not numbers.

    >>> Hinge().describe()["name"]
    'hinge'

    Source: sklearn.metrics.hinge_loss before its mean.
    """

    name: ClassVar[str] = "hinge"
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the prediction's type and shape."""
        return float_labels(self.name, predicted, given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels outside −1 and 1."""
        allowed = np.asarray(labels == -1)
        require_range(self.name, labels, 1, 1, allowed=allowed, hint="The classes are -1 and 1.")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""
        return op.Relu(1 - expected * predicted)
