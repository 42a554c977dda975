"""Shared by metrics of classes: the classes that labels and predictions mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_core import Array, DataError, number, setting, shape_text
from ortflex_plugins.metrics._averages import same_shape


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
