"""Shared by metrics: weighted sums over the batches in float64, and the classes that arrays mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ortflex_core import Array, DataError, MetricState, number, setting, shape_text


def same_shape(metric: str, expected: Array, predicted: Array) -> None:
    """Refuse predictions of another shape; [B] and [B, 1] together would broadcast to [B, B].

    Raises:
        DataError: names the two shapes.
    """
    if expected.shape != predicted.shape:
        hint = "; reshape one of them" if expected.size == predicted.size else ""
        raise DataError(
            f"{metric}: labels {shape_text(expected.shape)} and predictions "
            f"{shape_text(predicted.shape)} must have the same shape{hint}"
        )


def columns(metric: str, values: Array, weight: Array | None) -> tuple[Array, Array]:
    """Values and their weights as float64 [B, k], with one column per output.

    ``weight`` has the shape [B], or one that broadcasts to the shape of the values.

    Raises:
        DataError: the weights do not fit.
    """
    table = np.asarray(values, dtype=np.float64)
    weights = np.ones((1,) * table.ndim) if weight is None else np.asarray(weight, np.float64)
    if weights.ndim == 1 and table.ndim > 1:
        weights = weights.reshape(-1, *[1] * (table.ndim - 1))
    try:
        weights = np.broadcast_to(weights, table.shape)
    except ValueError as error:
        raise DataError(
            f"{metric}: sample weights {shape_text(weights.shape)} do not fit the labels "
            f"{shape_text(table.shape)}"
        ) from error
    width = math.prod(table.shape[1:])
    return table.reshape(table.shape[0], width), weights.reshape(table.shape[0], width)


class Average:
    """The state of a metric that is a weighted mean of values.

    Args:
        metric: the name of the metric, for errors.
        values: computes the values [B, …] of a batch from its labels and predictions.
        finish: a function of the mean of each column; by default the means are the result.
    """

    def __init__(
        self,
        metric: str,
        values: Callable[[Array, Array], Array],
        finish: Callable[[Array], Array] = np.asarray,
    ) -> None:
        self._metric, self._values, self._finish = metric, values, finish
        self._sum: Array | float = 0.0
        self._weight: Array | float = 0.0

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        table, weights = columns(self._metric, self._values(expected, predicted), weight)
        self._sum = self._sum + (table * weights).sum(axis=0)
        self._weight = self._weight + weights.sum(axis=0)

    def result(self) -> float:
        """The mean over rows and columns; NaN if the weights of a column sum to 0."""
        empty = np.equal(self._weight, 0)
        means = np.where(empty, np.nan, self._sum / np.where(empty, 1.0, self._weight))
        return float(self._finish(means).mean())


class Finite:
    """The state of a metric whose result is NaN after a prediction that is not finite.

    NaN compares as false, and a largest score of infinity says nothing, so formulas would give ordinary
    numbers. With ``scores``, −∞ is allowed for some classes of a row (axis 1), as masks have it.
    """

    def __init__(self, state: MetricState, *, scores: bool = False) -> None:
        self._state, self._scores = state, scores
        self._finite = True

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        """Add one batch; none is added after a prediction that is not finite."""
        if predicted.dtype.kind == "f" and predicted.size:
            columns = self._scores and predicted.ndim > 1
            decisive = predicted.max(axis=1) if columns else predicted  # NaN if one is NaN
            self._finite = self._finite and bool(np.isfinite(decisive).all())
        if self._finite:
            self._state.update(expected, predicted, weight)

    def result(self) -> float:
        """The metric over all batches so far, or NaN."""
        return self._state.result() if self._finite else math.nan


def threshold_field() -> Any:
    """The field ``threshold`` of metrics that predict class 1 above a number."""
    text = "the value above which class 1 is predicted; use 0 for logits"
    return setting(default=0.5, validator=number(), help=text)


def classes(
    metric: str, expected: Array, predicted: Array, threshold: float
) -> tuple[Array, Array]:
    """Labels and predicted classes, in the same shape.

    Integers, booleans and strings are classes. Floats [B, C, …] with labels [B, …] or one-hot labels
    are scores, and the class is the largest in axis 1. Floats in the shape of the labels, [B] or [B, 1],
    mean class 1 if they are above ``threshold``, else class 0.

    Raises:
        DataError: labels and predictions do not fit, or a row has several classes.
    """
    if predicted.dtype.kind != "f":
        same_shape(metric, expected, predicted)
        if (expected.dtype.kind in "OUS") != (predicted.dtype.kind in "OUS"):
            raise DataError(
                f"{metric}: labels of type {expected.dtype} cannot equal predictions of type "
                f"{predicted.dtype}; class names become numbers by classes=[…]"
            )
        return expected, predicted
    if not has_columns(predicted):
        _no_names(metric, expected)
        same_shape(metric, expected, predicted)
        return _whole(metric, expected), predicted > threshold
    return numbers(metric, expected, predicted), predicted.argmax(axis=1)


def has_columns(predicted: Array) -> bool:
    """Whether predictions have more than one column, in axis 1."""
    return predicted.ndim >= 2 and predicted.shape[1] > 1


def numbers(metric: str, expected: Array, predicted: Array) -> Array:
    """Class indices [B, …] from labels, for scores [B, C, …].

    Raises:
        DataError: the labels have another shape, or a row does not have one class.
    """
    _no_names(metric, expected)
    shape = predicted.shape
    if expected.shape == shape:
        return _one_hot(metric, expected)
    if expected.shape == (shape[0], *shape[2:]):
        return _whole(metric, expected)
    raise DataError(
        f"{metric}: predictions {shape_text(shape)} need labels of shape "
        f"{shape_text((shape[0], *shape[2:]))}, or one-hot {shape_text(shape)}, got "
        f"{shape_text(expected.shape)}"
    )


def rows_of_columns(scores: Array) -> Array:
    """Scores [B, C, …] as [B·…, C]."""
    return np.moveaxis(scores, 1, -1).reshape(-1, scores.shape[1])


def _no_names(metric: str, expected: Array) -> None:
    if expected.dtype.kind in "OUS":
        raise DataError(
            f"{metric}: labels of type {expected.dtype} do not fit float predictions; class names "
            "become numbers by classes=[…]"
        )


def _whole(metric: str, expected: Array) -> Array:
    """The labels, which must be whole numbers."""
    broken = expected != np.round(expected) if expected.dtype.kind == "f" else np.zeros(1, bool)
    if broken.any():
        first = expected[broken].flat[0]
        raise DataError(
            f"{metric}: labels must be class indices, but {int(broken.sum())} of {expected.size} "
            f"are not; the first is {first!s}. For a regression use mae, rmse or r2"
        )
    return expected


def _one_hot(metric: str, expected: Array) -> Array:
    """The classes of one-hot labels."""
    total = expected.sum(axis=1)
    if not np.allclose(total, 1):
        row = int(np.argwhere(~np.isclose(total, 1))[0][0])
        raise DataError(
            f"{metric}: labels of the predictions' shape {shape_text(expected.shape)} must be "
            f"one-hot, but row {row} sums to {total[row]!s}"
        )
    return np.asarray(expected.argmax(axis=1))
