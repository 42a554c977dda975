"""Metrics of classes: ``accuracy``, ``top_k``, ``f1``, ``roc_auc``."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, DataError, Metric, number, one_of, setting, shape_text
from ortflex_plugins.metrics._shared import (
    Average,
    Finite,
    classes,
    columns,
    has_columns,
    numbers,
    rows_of_columns,
    same_shape,
    threshold_field,
)


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

    threshold: float = threshold_field()

    def start(self) -> Finite:
        return Finite(Average(self.name, self._correct), scores=True)

    def _correct(self, expected: Array, predicted: Array) -> Array:
        labels, guesses = classes(self.name, expected, predicted, self.threshold)
        return np.equal(labels, guesses)


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


@attrs.frozen(kw_only=True)
class F1(Metric):
    """Harmonic mean of precision and recall: ``2·tp / (2·tp + fp + fn)``, or 0 if the denominator is 0.

    ``tp``, ``fp`` and ``fn`` are the weighted counts of true positives, false positives and false
    negatives of a class. With ``average="binary"``, the result is the score of the class ``positive``.
    With ``"macro"``, it is the mean over all classes in the labels or predictions; with ``"weighted"``,
    this mean is weighted by the number of labels of each class. With ``"micro"``, the counts of
    all classes are added before the score is computed. Labels and predictions have the forms that
    ``accuracy`` accepts. The result is in [0, 1], or NaN if there are no rows.

    Raises:
        ValueError: ``average`` has another value.
        DataError: labels and predictions do not fit, or there are more than two classes and ``average``
            is ``"binary"``.

    >>> import numpy as np
    >>> state = F1().start()
    >>> state.update(np.array([1, 1, 0]), np.array([0.9, 0.2, 0.7]), None)
    >>> state.result()
    0.5

    Source: sklearn.metrics.f1_score.
    """

    name: ClassVar[str] = "f1"
    aliases: ClassVar[tuple[str, ...]] = ("f1_score",)
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    average: Literal["binary", "macro", "micro", "weighted"] = setting(
        default="binary",
        validator=one_of("binary", "macro", "micro", "weighted"),
        help="how the scores of the classes are averaged",
    )
    positive: int = setting(default=1, help='the class that `average="binary"` treats as positive')
    threshold: float = threshold_field()

    def start(self) -> Finite:
        return Finite(F1State(self), scores=True)


class F1State:
    """The weights of correct predictions, of predictions and of labels, for each class."""

    def __init__(self, metric: F1) -> None:
        self._metric = metric
        self._counts: dict[Any, Array] = {}

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        labels, guesses = classes("f1", expected, predicted, self._metric.threshold)
        weights = columns("f1", np.zeros(labels.shape), weight)[1].ravel()
        names, places = np.unique(
            np.concatenate([labels.ravel(), guesses.ravel()]), return_inverse=True
        )
        label, guess = np.split(places.ravel(), 2)
        correct = label == guess
        table = np.stack(
            [
                np.bincount(label[correct], weights[correct], len(names)),
                np.bincount(guess, weights, len(names)),
                np.bincount(label, weights, len(names)),
            ],
            axis=1,
        )
        for name, row in zip(names.tolist(), table, strict=True):
            self._counts[name] = self._counts.get(name, 0.0) + row
        if self._metric.average == "binary" and len(self._counts) > 2:
            known = ", ".join(map(repr, sorted(self._counts)[:5]))
            raise DataError(
                f"f1: average='binary' needs two classes, got {known}, …; choose average='macro', "
                "'micro' or 'weighted'"
            )

    def result(self) -> float:
        """The F1 over all rows; NaN without rows."""
        if not any(row[2] for row in self._counts.values()):
            return math.nan
        table = np.stack(list(self._counts.values()))
        average = self._metric.average
        if average == "binary":
            return float(_f1(self._counts.get(self._metric.positive, np.zeros(3))))
        if average == "micro":
            return float(_f1(table.sum(axis=0)))
        return float(np.average(_f1(table), weights=table[:, 2] if average == "weighted" else None))


def _f1(counts: Array) -> Array:
    """F1 from the counts in the last axis; 0 if all counts are 0."""
    denominators = counts[..., 1] + counts[..., 2]
    return np.asarray(2 * counts[..., 0] / np.where(denominators == 0, 1.0, denominators))


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
