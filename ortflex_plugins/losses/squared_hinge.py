"""The loss ``squared_hinge``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor
from ortflex_plugins.losses.hinge import Hinge


@attrs.frozen(kw_only=True)
class SquaredHinge(Hinge):
    """Squared hinge loss of raw scores: ``l = max(0, 1 − y·s)²``.

    Labels are −1 or 1; labels and values have the shape of the scores, [B, …].

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
