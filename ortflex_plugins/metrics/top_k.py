"""The metric ``top_k``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, DataError, Metric, number, setting, shape_text
from ortflex_plugins.metrics._averages import Average, Finite
from ortflex_plugins.metrics._classes import has_columns, numbers


@attrs.frozen(kw_only=True)
class TopK(Metric):
    """Fraction of rows whose class is among the ``k`` with the largest scores: ``Σ w·[y ∈ top k] / Σ w``.

    Predictions are floats of shape [B, C, …], and labels are class indices of shape [B, …] or one-hot
    vectors. Among classes with equal scores, the larger class index comes first. The result is in
    [0, 1], or NaN if there are no rows.

    Raises:
        ValueError: ``k`` is less than 1.
        DataError: labels and predictions do not fit, or there are no columns of scores.

    >>> import numpy as np
    >>> state = TopK(k=2).start()
    >>> state.update(np.array([0, 1]), np.array([[0.3, 0.6, 0.1], [0.5, 0.1, 0.4]]), None)
    >>> state.result()
    0.5

    Source: sklearn.metrics.top_k_accuracy_score.
    """

    name: ClassVar[str] = "top_k"
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    k: int = setting(
        default=5, validator=number(ge=1), help="the number of highest-scoring classes to consider"
    )

    def start(self) -> Finite:
        """An empty accumulator."""
        return Finite(Average(self.name, self._correct), scores=True)

    def _correct(self, expected: Array, predicted: Array) -> Array:
        if predicted.dtype.kind != "f" or not has_columns(predicted):
            raise DataError(
                f"top_k expects scores [B, C, …] of several classes, got {predicted.dtype} "
                f"{shape_text(predicted.shape)}"
            )
        labels = np.expand_dims(numbers(self.name, expected, predicted), 1)
        first = np.argsort(predicted, axis=1, kind="stable")[:, -self.k :]
        return np.asarray((first == labels).any(axis=1))
