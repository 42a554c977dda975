"""Metrics of numbers: ``mae``, ``rmse``, ``r2``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, Metric
from ortflex_plugins.metrics._shared import Average, Finite, columns, same_shape


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
        return Finite(Average(self.name, self._squares, np.sqrt))

    def _squares(self, expected: Array, predicted: Array) -> Array:
        same_shape(self.name, expected, predicted)
        return np.asarray((expected.astype(float) - predicted.astype(float)) ** 2)


@attrs.frozen(kw_only=True)
class R2(Metric):
    """Coefficient of determination: ``1 − Σ w·(y − p)² / Σ w·(y − ȳ)²``, averaged over the outputs.

    Labels and predictions have the same shape, [B, …]. If all labels of an output are equal, its score
    is 1 for a perfect prediction and 0 otherwise, as in scikit-learn. With fewer than two rows, the
    result is NaN.

    Raises:
        DataError: labels and predictions of different shapes, or weights that do not fit.

    >>> import numpy as np
    >>> state = R2().start()
    >>> state.update(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.5]), None)
    >>> state.result()
    0.875

    Source: sklearn.metrics.r2_score(multioutput="uniform_average"); the variances of the batches are
    merged as in T. Chan, G. Golub and R. LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979).
    """

    name: ClassVar[str] = "r2"
    aliases: ClassVar[tuple[str, ...]] = ("r2_score",)
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    def start(self) -> Finite:
        return Finite(R2State())


class R2State:
    """Weights, means and squared deviations of each output."""

    def __init__(self) -> None:
        self._rows = 0
        self._weight: Array | float = 0.0
        self._mean: Array | float = 0.0
        self._total: Array | float = 0.0
        self._residual: Array | float = 0.0

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        same_shape("r2", expected, predicted)
        labels, weights = columns("r2", expected, weight)
        errors = labels - columns("r2", predicted, None)[0]
        added = weights.sum(axis=0)
        mean = _divide((weights * labels).sum(axis=0), added)
        merged = self._weight + added
        # Sums of y and y² would cancel where the mean is large compared with the deviation.
        shift = mean - self._mean
        between = _divide(self._weight * added, merged) * shift**2
        self._total = self._total + (weights * (labels - mean) ** 2).sum(axis=0) + between
        self._mean = self._mean + shift * _divide(added, merged)
        self._residual = self._residual + (weights * errors**2).sum(axis=0)
        self._weight = merged
        self._rows += len(labels)

    def result(self) -> float:
        """The mean of the outputs' coefficients; NaN for fewer than two rows or a weight of 0."""
        residual, total = np.atleast_1d(self._residual), np.atleast_1d(self._total)
        if self._rows < 2 or np.any(np.atleast_1d(self._weight) == 0):
            return float("nan")
        perfect = np.where(residual == 0, 1.0, 0.0)
        scores = np.where(total == 0, perfect, 1 - residual / np.where(total == 0, 1.0, total))
        return float(scores.mean())


def _divide(a: Array | float, b: Array | float) -> Array:
    """``a / b``, and 0 where ``b`` is 0: rows without weight change nothing."""
    return np.asarray(np.where(np.equal(b, 0), 0.0, a / np.where(np.equal(b, 0), 1.0, b)))
