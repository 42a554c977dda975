"""The metric ``accuracy``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core.component import number
from ortflex_core.errors import DataError
from ortflex_core.protocols import Metric
from ortflex_core.types import Array, shape_text
from ortflex_plugins.metrics._averages import Average, same_shape


@attrs.frozen(kw_only=True)
class Accuracy(Metric):
    """Share of right answers: ``Σ w·[y = c] / Σ w`` with the predicted class ``c``.

    What a prediction says depends on its form: integers, booleans and strings are classes; floats
    [B, C, …] beside labels [B, …] are scores or probabilities, the largest in axis 1 wins; floats
    of the labels' shape, [B] or [B, 1], mean class 1 above ``threshold`` (0.5 is for
    probabilities; raw scores need 0). One-hot labels [B, C] are taken for their class.

    Raises:
        ValueError: ``threshold`` is not a number.
        DataError: labels and predictions do not fit, or several classes of a row are right.

    >>> state = Accuracy().start()
    >>> state.update(np.array([1, 0]), np.array([[0.3, 0.7], [0.2, 0.8]]), None)
    >>> state.result()
    0.5

    Source: sklearn.metrics.accuracy_score.
    """

    name: ClassVar[str] = "accuracy"
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    threshold: float = attrs.field(
        default=0.5, validator=number(), metadata={"help": "class 1 begins above it; 0 for scores"}
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
        labels, classes = self._classes(expected, predicted)
        self._right.add(labels == classes, weight)

    def result(self) -> float:
        """The share of right answers; NaN of nothing."""
        return float(self._right.means().mean())

    def _classes(self, expected: Array, predicted: Array) -> tuple[Array, Array]:
        if predicted.dtype.kind != "f":
            same_shape("accuracy", expected, predicted)
            if (expected.dtype.kind in "OUS") != (predicted.dtype.kind in "OUS"):
                raise DataError(
                    f"accuracy: labels of type {expected.dtype} cannot equal predictions of type "
                    f"{predicted.dtype}; class names become numbers by classes=[…]"
                )
            return expected, predicted
        if expected.dtype.kind in "OUS":
            raise DataError(
                f"accuracy: labels of type {expected.dtype} beside float predictions; class names "
                "become numbers by classes=[…]"
            )
        shape = predicted.shape
        if predicted.ndim >= 2 and shape[1] > 1:
            if expected.shape == shape:
                return _one_hot(expected), predicted.argmax(axis=1)
            if expected.shape == (shape[0], *shape[2:]):
                return expected, predicted.argmax(axis=1)
            raise DataError(
                f"accuracy: predictions {shape_text(shape)} need labels of shape "
                f"{shape_text((shape[0], *shape[2:]))}, or one-hot {shape_text(shape)}, got "
                f"{shape_text(expected.shape)}"
            )
        same_shape("accuracy", expected, predicted)
        return expected, predicted > self._threshold


def _one_hot(expected: Array) -> Array:
    """The classes of one-hot labels."""
    total = expected.sum(axis=1)
    if not np.allclose(total, 1):
        row = int(np.argwhere(~np.isclose(total, 1))[0][0])
        raise DataError(
            f"accuracy: labels of the predictions' shape {shape_text(expected.shape)} must be "
            f"one-hot, but row {row} sums to {total[row]!s}"
        )
    return np.asarray(expected.argmax(axis=1))
