"""What the metrics share: weighted sums, batch by batch, in float64."""

from __future__ import annotations

import math

import numpy as np

from ortflex_core.errors import DataError
from ortflex_core.types import Array, shape_text


def same_shape(metric: str, expected: Array, predicted: Array) -> None:
    """Refuse predictions of another shape; [B] and [B, 1] together would broadcast to [B, B].

    Raises:
        DataError: the two shapes.
    """
    if expected.shape != predicted.shape:
        hint = "; reshape one of them" if expected.size == predicted.size else ""
        raise DataError(
            f"{metric}: labels {shape_text(expected.shape)} and predictions "
            f"{shape_text(predicted.shape)} must have the same shape{hint}"
        )


def columns(metric: str, values: Array, weight: Array | None) -> tuple[Array, Array]:
    """Values and their weights as float64 [B, k], one column an output.

    ``weight`` has the shape [B], or one that broadcasts to the values'.

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
    """The weighted mean of each column; NaN while the weights sum to 0."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._sum: Array | None = None
        self._weight: Array | None = None

    def add(self, values: Array, weight: Array | None) -> None:
        """Take in one batch of values [B, …]."""
        table, weights = columns(self._metric, values, weight)
        total, mass = (table * weights).sum(axis=0), weights.sum(axis=0)
        self._sum = total if self._sum is None else self._sum + total
        self._weight = mass if self._weight is None else self._weight + mass

    def means(self) -> Array:
        """The mean of each column."""
        if self._sum is None or self._weight is None:
            return np.full(1, np.nan)
        empty = self._weight == 0
        return np.where(empty, np.nan, self._sum / np.where(empty, 1.0, self._weight))
