"""Mean errors of regressions: ``mae``, ``rmse``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, Metric
from ortflex_plugins.metrics._averages import Average, Finite, same_shape


@attrs.frozen(kw_only=True)
class MeanAbsoluteError(Metric):
    """Mean absolute error in the unit of the labels: ``Σ w·|y − p| / Σ w``, averaged over the outputs.

    Labels and predictions have the same shape, [B, …].

    Raises:
        DataError: labels and predictions of different shapes, or weights that do not fit.

    >>> import numpy as np
    >>> state = MeanAbsoluteError().start()
    >>> state.update(np.array([1.0, 2.0]), np.array([1.5, 2.0]), None)
    >>> state.result()
    0.25

    Source: sklearn.metrics.mean_absolute_error.
    """

    name: ClassVar[str] = "mae"
    aliases: ClassVar[tuple[str, ...]] = ("mean_absolute_error",)
    better: ClassVar[Literal["higher", "lower"]] = "lower"

    def start(self) -> Finite:
        """An empty accumulator."""
        return Finite(Average(self.name, self._errors))

    def _errors(self, expected: Array, predicted: Array) -> Array:
        same_shape(self.name, expected, predicted)
        return abs(expected.astype(float) - predicted.astype(float))


@attrs.frozen(kw_only=True)
class RootMeanSquaredError(Metric):
    """Root mean squared error in the unit of the labels: ``√(Σ w·(y − p)² / Σ w)``.

    Labels and predictions have the same shape, [B, …]. With several outputs, the result is the mean of
    their root mean squared errors.

    Raises:
        DataError: labels and predictions of different shapes, or weights that do not fit.

    >>> import numpy as np
    >>> state = RootMeanSquaredError().start()
    >>> state.update(np.array([1.0, 2.0]), np.array([2.0, 1.0]), None)
    >>> state.result()
    1.0

    Source: sklearn.metrics.root_mean_squared_error.
    """

    name: ClassVar[str] = "rmse"
    better: ClassVar[Literal["higher", "lower"]] = "lower"

    def start(self) -> Finite:
        """An empty accumulator."""
        return Finite(Average(self.name, self._squares, np.sqrt))

    def _squares(self, expected: Array, predicted: Array) -> Array:
        same_shape(self.name, expected, predicted)
        return np.asarray((expected.astype(float) - predicted.astype(float)) ** 2)
