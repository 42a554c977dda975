"""The metric ``f1``."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core.component import number, one_of, setting
from ortflex_core.errors import DataError
from ortflex_core.protocols import Metric
from ortflex_core.types import Array
from ortflex_plugins.metrics._averages import columns
from ortflex_plugins.metrics._classes import classes


@attrs.frozen(kw_only=True)
class F1(Metric):
    """Harmonic mean of precision and recall: ``2·tp / (2·tp + fp + fn)``, or 0 if the denominator is 0.

    ``average``: ``"binary"`` is that of the class ``positive``; ``"macro"`` the mean over all classes
    that labels or predictions have, ``"weighted"`` that mean weighted by their labels, ``"micro"``
    that of all counts together. What a prediction says is read as by ``accuracy``.

    Raises:
        ValueError: ``average`` has another value.
        DataError: labels and predictions do not fit, or there are more than two classes under
            ``"binary"``.

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
    positive: int = setting(default=1, help="the positive class, if there are two")
    threshold: float = setting(
        default=0.5, validator=number(), help="class 1 is predicted above this value; 0 for scores"
    )

    def start(self) -> F1State:
        """An empty accumulator."""
        return F1State(self)


class F1State:
    """Of each class: the weights of right predictions, of predictions, of labels."""

    def __init__(self, metric: F1) -> None:
        self._metric = metric
        self._counts: dict[Any, Array] = {}

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        """Take in one batch."""
        labels, found = classes("f1", expected, predicted, self._metric.threshold)
        weights = columns("f1", np.zeros(labels.shape), weight)[1].ravel()
        names, places = np.unique(
            np.concatenate([labels.ravel(), found.ravel()]), return_inverse=True
        )
        label, guess = np.split(places.ravel(), 2)
        right = label == guess
        table = np.stack(
            [
                np.bincount(label[right], weights[right], len(names)),
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
        """The F1; NaN of nothing."""
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
    """Of the counts in the last axis; 0 without counts."""
    below = counts[..., 1] + counts[..., 2]
    return np.asarray(2 * counts[..., 0] / np.where(below == 0, 1.0, below))
