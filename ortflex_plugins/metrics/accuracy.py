"""The metric ``accuracy``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from ortflex_core.component import number, setting
from ortflex_core.protocols import Metric
from ortflex_core.types import Array
from ortflex_plugins.metrics._averages import Average
from ortflex_plugins.metrics._classes import classes


@attrs.frozen(kw_only=True)
class Accuracy(Metric):
    """Fraction of correct predictions: ``Σ w·[y = c] / Σ w`` with the predicted class ``c``.

    The meaning of a prediction depends on its form: integers, booleans and strings are classes; floats
    [B, C, …] with labels [B, …] are scores or probabilities, the largest in axis 1 wins; floats
    of the labels' shape, [B] or [B, 1], mean class 1 above ``threshold`` (0.5 is for
    probabilities; raw scores need 0). One-hot labels [B, C] are taken for their class.

    Raises:
        ValueError: ``threshold`` is not a number.
        DataError: labels and predictions do not fit, or several classes of a row are right.

    >>> import numpy as np
    >>> state = Accuracy().start()
    >>> state.update(np.array([1, 0]), np.array([[0.3, 0.7], [0.2, 0.8]]), None)
    >>> state.result()
    0.5

    Source: sklearn.metrics.accuracy_score.
    """

    name: ClassVar[str] = "accuracy"
    aliases: ClassVar[tuple[str, ...]] = ("acc",)
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    threshold: float = setting(
        default=0.5, validator=number(), help="class 1 is predicted above this value; 0 for scores"
    )

    def start(self) -> AccuracyState:
        """An empty accumulator."""
        return AccuracyState(self.threshold)


class AccuracyState:
    """Weighted counts of right answers."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._right = Average("accuracy")

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        """Take in one batch."""
        labels, found = classes("accuracy", expected, predicted, self._threshold)
        self._right.add(labels == found, weight)

    def result(self) -> float:
        """The fraction of right answers; NaN of nothing."""
        return float(self._right.means().mean())
