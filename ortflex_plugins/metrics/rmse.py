"""The metric ``rmse``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core.protocols import Metric
from ortflex_core.types import Array
from ortflex_plugins.metrics._averages import Average, same_shape


@attrs.frozen(kw_only=True)
class RootMeanSquaredError(Metric):
    """Root of the mean squared error: ``√(Σ w·(y − p)² / Σ w)``, in the label's unit.

    The root is taken of each output, then the outputs are averaged.

    Raises:
        DataError: labels and predictions of different shapes, or weights that do not fit.

    >>> state = RootMeanSquaredError().start()
    >>> state.update(np.array([1.0, 2.0]), np.array([2.0, 1.0]), None)
    >>> state.result()
    1.0

    Source: sklearn.metrics.root_mean_squared_error.
    """

    name: ClassVar[str] = "rmse"
    better: ClassVar[Literal["higher", "lower"]] = "lower"

    def start(self) -> RmseState:
        """An empty accumulator."""
        return RmseState()


class RmseState:
    """Weighted sums of squared errors."""

    def __init__(self) -> None:
        self._squares = Average("rmse")

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        """Take in one batch."""
        same_shape("rmse", expected, predicted)
        self._squares.add((expected.astype(float) - predicted.astype(float)) ** 2, weight)

    def result(self) -> float:
        """The mean of the outputs' roots; NaN of nothing."""
        return float(np.sqrt(self._squares.means()).mean())
