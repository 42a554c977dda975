"""The metric ``accuracy``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, Metric, number, setting
from ortflex_plugins.metrics._averages import Average, Finite
from ortflex_plugins.metrics._classes import classes


@attrs.frozen(kw_only=True)
class Accuracy(Metric):
    """Fraction of correct predictions: ``Σ w·[y = c] / Σ w`` with the predicted class ``c``.

    The type and shape of a prediction determine how it is interpreted. Integers, booleans and strings
    are classes. Floats of shape [B, C, …], with labels of shape [B, …], are logits or probabilities, and
    the predicted class is the one with the largest value along axis 1. Floats that have the same shape
    as the labels, [B] or [B, 1], predict class 1 if they are above ``threshold``. The default threshold
    of 0.5 is for probabilities; use 0 for logits. One-hot labels of shape [B, C] are converted to
    classes. The result is in [0, 1], or NaN if there are no rows.

    Raises:
        ValueError: ``threshold`` is not a number.
        DataError: labels and predictions do not fit, or a row has several classes.

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
        default=0.5,
        validator=number(),
        help="the value above which class 1 is predicted; use 0 for logits",
    )

    def start(self) -> Finite:
        """An empty accumulator."""
        return Finite(Average(self.name, self._correct), scores=True)

    def _correct(self, expected: Array, predicted: Array) -> Array:
        labels, guesses = classes(self.name, expected, predicted, self.threshold)
        return np.equal(labels, guesses)
