"""Hinge losses of raw scores: ``hinge``, ``squared_hinge``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, Ops, Tensor, TensorSpec, require_range
from ortflex_plugins.losses.regression import ElementwiseLoss


@attrs.frozen(kw_only=True)
class Hinge(ElementwiseLoss):
    """Hinge loss of raw scores: ``l = max(0, 1 − y·s)``.

    Labels are −1 or 1. Labels and loss values have the shape of the scores, [B, …].

    Raises:
        DataError: the labels have another shape, are outside their range, or are not numbers.

    >>> Hinge().describe()
    {'name': 'hinge'}

    Source: sklearn.metrics.hinge_loss before averaging.
    """

    name: ClassVar[str] = "hinge"
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels other than −1 and 1."""
        negative = np.asarray(labels == -1)
        require_range(self.name, labels, 1, 1, allowed=negative, hint="The classes are -1 and 1.")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""
        return op.Relu(1 - expected * predicted)


@attrs.frozen(kw_only=True)
class SquaredHinge(Hinge):
    """Squared hinge loss of raw scores: ``l = max(0, 1 − y·s)²``.

    Labels are −1 or 1. Labels and loss values have the shape of the scores, [B, …].

    Raises:
        DataError: the labels have another shape, are outside their range, or are not numbers.

    >>> SquaredHinge().describe()
    {'name': 'squared_hinge'}

    Source: scikit-learn's SGDClassifier(loss="squared_hinge").
    """

    name: ClassVar[str] = "squared_hinge"

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""
        margin = op.Relu(1 - expected * predicted)
        return margin * margin
