"""The metric ``roc_auc``."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, DataError, Metric, one_of, setting, shape_text
from ortflex_plugins.metrics._averages import Finite, columns, same_shape
from ortflex_plugins.metrics._classes import has_columns, numbers, rows_of_columns


@attrs.frozen(kw_only=True)
class RocAuc(Metric):
    """Area under the ROC curve: ``P(s > r) + ½·P(s = r)``.

    Here, s is the score of a random row of the positive class, and r is the score of a random row of
    another class.

    Predictions of shape [B] or [B, 1] are the scores of class 1, and predictions of shape [B, 2] are
    the scores of both classes. With more columns, each class is compared with all others, and
    ``average`` combines the results. Labels are class indices of shape [B, …], or arrays of 0s and 1s
    that have the same shape as the predictions, with any number of 1s per row. The result is in [0, 1],
    or NaN if a class contains none or all of the rows. Scores and labels are kept in memory until the
    evaluation ends. They need 9 bytes per row and column, and sample weights need another 8 bytes per row.

    Raises:
        ValueError: ``average`` has another value.
        DataError: labels and predictions do not fit.

    >>> import numpy as np
    >>> state = RocAuc().start()
    >>> state.update(np.array([0, 1, 0, 1]), np.array([0.1, 0.4, 0.35, 0.8]), None)
    >>> state.result()
    1.0

    Source: sklearn.metrics.roc_auc_score(multi_class="ovr").
    """

    name: ClassVar[str] = "roc_auc"
    aliases: ClassVar[tuple[str, ...]] = ("auc", "auroc")
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    average: Literal["macro", "weighted"] = setting(
        default="macro",
        validator=one_of("macro", "weighted"),
        help="``macro`` is the mean over the classes; ``weighted`` is the mean weighted by the "
        "number of rows of each class",
    )

    def start(self) -> Finite:
        return Finite(RocAucState(self.average), scores=True)


class RocAucState:
    """All rows so far: scores and true labels [n, k], weights [n]."""

    def __init__(self, average: str) -> None:
        self._average = average
        self._scores: list[Array] = []
        self._truths: list[Array] = []
        self._weights: list[Array | None] = []

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        if predicted.dtype.kind != "f":
            raise DataError(f"roc_auc expects scores or probabilities, got {predicted.dtype}")
        if not has_columns(predicted):
            same_shape("roc_auc", expected, predicted)
            truths, scores = expected.reshape(-1, 1), predicted.reshape(-1, 1)
            positions = predicted.shape
        else:
            truths, scores = _by_class(expected, predicted)
            positions = (len(predicted), *predicted.shape[2:])
        wrong = truths[(truths != 0) & (truths != 1)]
        if wrong.size:
            raise DataError(f"roc_auc: labels must be 0 and 1, got {wrong[0]!r}")
        weights = None
        if weight is not None:
            weights = columns("roc_auc", np.zeros(positions), weight)[1].ravel()
        self._scores.append(scores.astype(np.float64))
        self._truths.append(truths.astype(bool))
        self._weights.append(weights)

    def result(self) -> float:
        """The area; NaN without rows."""
        if not self._scores:
            return math.nan
        scores, truths = np.concatenate(self._scores), np.concatenate(self._truths)
        given = zip(self._scores, self._weights, strict=True)
        weights = np.concatenate([np.ones(len(s)) if w is None else w for s, w in given])
        areas = [_area(s, t, weights) for s, t in zip(scores.T, truths.T, strict=True)]
        if self._average == "macro" or len(areas) == 1:
            return float(np.mean(areas))
        masses = weights @ truths
        return float(areas @ masses / masses.sum()) if masses.sum() else math.nan


def _by_class(expected: Array, predicted: Array) -> tuple[Array, Array]:
    """True labels and scores [n, k] of predictions [B, C, …]; one column where C is 2."""
    scores = rows_of_columns(predicted)
    if expected.shape == predicted.shape:
        truths = rows_of_columns(expected)
        exclusive = scores.shape[1] == 2 and np.all(truths.sum(axis=1) == 1)
    else:
        labels = numbers("roc_auc", expected, predicted).reshape(-1, 1)
        wrong = labels[(labels < 0) | (labels >= scores.shape[1])]
        if wrong.size:
            raise DataError(
                f"roc_auc: predictions {shape_text(predicted.shape)} have no class {wrong[0]!r}; "
                "labels must be class indices from 0"
            )
        truths, exclusive = labels == np.arange(scores.shape[1]), scores.shape[1] == 2
    if exclusive:
        # Raw scores matter only by their difference, which has the same order for probabilities.
        return truths[:, 1:], scores[:, 1:].astype(np.float64) - scores[:, :1]
    return truths, scores


def _area(scores: Array, truths: Array, weights: Array) -> float:
    """The area under one curve: the trapezoids between different scores."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    positive = np.cumsum(np.where(truths, weights, 0.0)[order])
    negative = np.cumsum(np.where(truths, 0.0, weights)[order])
    if not len(ranked) or positive[-1] == 0 or negative[-1] == 0:
        return math.nan
    last = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    x, y = np.append(0.0, negative[last]), np.append(0.0, positive[last])
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1])) / 2 / (negative[-1] * positive[-1]))
