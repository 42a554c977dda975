"""The metric ``average_precision`` of object detection."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, DataError, Metric, number, setting, shape_text

_RECALLS = np.linspace(0, 1, 101)
_COCO = tuple(round(0.5 + 0.05 * k, 2) for k in range(10))


@attrs.frozen(kw_only=True)
class AveragePrecision(Metric):
    """Mean average precision of predicted boxes (COCO's mAP) over classes and IoU thresholds.

    By default, the IoU thresholds are 0.5, 0.55, …, 0.95. Predictions have the shape [N, D, 6]: x1, y1,
    x2, y2, score and class of each box after non-maximum suppression. The detection losses convert the
    outputs of the model to this form. Labels have the shape [N, M, 5]: x1, y1, x2, y2 and class,
    where rows with the class −1 are padding. For each class and IoU threshold, the predicted boxes of
    all images are matched by descending score. A predicted box is correct if its IoU
    with a labeled box reaches the threshold and no other predicted box has been matched to this labeled
    box. For each of the recall levels 0, 0.01, …, 1, the metric finds the highest precision at this or
    a higher recall. The average precision is the mean of these values. The result is the mean over the
    thresholds and over the classes that have boxes in the labels, or NaN if there are no such boxes.

    ``iou=0.5`` computes mAP@50, and ``only=3`` computes the average precision of class 3.
    ``Trainer.evaluate`` returns the results as ``average_precision_50`` and
    ``average_precision_class_3``. In the History, these names have the prefix ``validation_``. Sample
    weights are given per image.

    Raises:
        ValueError: ``iou`` is not above 0 and at most 1, or ``max_detections`` is below 1.
        DataError: labels or predictions have another shape.

    >>> import numpy as np
    >>> boxes = np.array([[[0, 0, 4, 4, 1], [2, 2, 8, 8, 1]]])
    >>> found = np.array([[[0, 0, 4, 4, 0.9, 1], [5, 5, 9, 9, 0.8, 1]]])
    >>> state = AveragePrecision(iou=0.5).start()
    >>> state.update(boxes, found, None)
    >>> round(state.result(), 3)
    0.505

    Source: T.-Y. Lin et al., "Microsoft COCO" (2014); pycocotools.cocoeval, all areas.
    """

    name: ClassVar[str] = "average_precision"
    aliases: ClassVar[tuple[str, ...]] = ("map", "mean_average_precision")
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    iou: float | None = setting(
        default=None,
        validator=attrs.validators.optional(number(gt=0, le=1)),
        help="the minimum IoU of a correct box; by default, the mean over the thresholds 0.5, 0.55, …, "
        "0.95 is computed",
    )
    only: int | None = setting(
        default=None,
        help="the only class to evaluate; by default, the mean over all classes is computed",
    )
    max_detections: int = setting(
        default=100, validator=number(ge=1), help="the maximum number of boxes per class and image"
    )

    @property
    def column(self) -> str:
        """With the threshold in percent and the class, if they are set."""
        threshold = "" if self.iou is None else f"_{100 * self.iou:g}"
        return f"{self.name}{threshold}" + ("" if self.only is None else f"_class_{self.only}")

    def start(self) -> AveragePrecisionState:
        return AveragePrecisionState(self)


class AveragePrecisionState:
    """For each class: the scores, weights and hits of all boxes, and the weight of the labels."""

    def __init__(self, metric: AveragePrecision) -> None:
        self._metric = metric
        thresholds = _COCO if metric.iou is None else (metric.iou,)
        self._thresholds = np.minimum(np.asarray(thresholds), 1 - 1e-10)
        self._found: dict[int, list[tuple[Array, Array, Array]]] = {}
        self._labels: dict[int, float] = {}
        self._finite = True

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        for what, array, columns in (("labels", expected, 5), ("predictions", predicted, 6)):
            if array.ndim != 3 or array.shape[2] != columns:
                hint = "x1, y1, x2, y2, class" if columns == 5 else "x1, y1, x2, y2, score, class"
                raise DataError(
                    f"average_precision: {what} must have the shape [N, boxes, {columns}] ({hint}), got "
                    f"{shape_text(array.shape)}"
                )
        if len(expected) != len(predicted):
            raise DataError(
                f"average_precision: {len(expected)} images have labels, {len(predicted)} predictions"
            )
        self._finite = self._finite and bool(np.isfinite(predicted).all())
        if not self._finite:
            return
        weights = np.ones(len(expected)) if weight is None else np.asarray(weight, np.float64)
        weights = weights.reshape(len(expected), -1)[:, 0]
        for boxes, found, w in zip(expected, predicted, weights, strict=True):
            if w > 0:
                self._add(boxes[boxes[:, 4] >= 0], found[found[:, 5] >= 0], float(w))

    def _add(self, boxes: Array, found: Array, weight: float) -> None:
        """The boxes of one image."""
        for kind in {*boxes[:, 4].astype(int).tolist(), *found[:, 5].astype(int).tolist()}:
            if self._metric.only not in (None, kind):
                continue
            own = boxes[boxes[:, 4] == kind].astype(np.float64)
            guesses = found[found[:, 5] == kind].astype(np.float64)
            guesses = guesses[np.argsort(-guesses[:, 4], kind="stable")]
            guesses = guesses[: self._metric.max_detections]
            self._labels[kind] = self._labels.get(kind, 0.0) + weight * len(own)
            right = _right(_overlaps(guesses[:, :4], own[:, :4]), self._thresholds)
            part = guesses[:, 4], np.full(len(guesses), weight), right
            self._found.setdefault(kind, []).append(part)

    def by_class(self) -> dict[int, float]:
        """The average precision of every class that the labels have."""
        return {k: self._of(k) for k in sorted(self._labels) if self._labels[k]}

    def _of(self, kind: int) -> float:
        scores, weights, right = (
            np.concatenate([part[k] for part in self._found[kind]], axis=-1) for k in range(3)
        )
        order = np.argsort(-scores, kind="stable")
        weights, right = weights[order], right[:, order]
        hits, all_ = np.cumsum(weights * right, axis=1), np.cumsum(weights)
        precision = np.divide(hits, all_, out=np.zeros_like(hits), where=all_ > 0)
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        values = []
        for recall, best in zip(hits / self._labels[kind], precision, strict=True):
            places = np.searchsorted(recall, _RECALLS, side="left")
            values.append(np.append(best, 0.0)[np.minimum(places, len(best))].mean())
        return float(np.mean(values))

    def result(self) -> float:
        """The mean over the classes; NaN without boxes in the labels, or after a box that is not finite."""
        values: list[Any] = list(self.by_class().values()) if self._finite else []
        return float(np.mean(values)) if values else math.nan


def _overlaps(first: Array, second: Array) -> Array:
    """The IoU of every pair, [D, M]."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    common = np.prod(np.clip(high - low, 0, None), axis=2)
    areas = [np.prod(np.clip(b[:, 2:] - b[:, :2], 0, None), axis=1) for b in (first, second)]
    union = areas[0][:, None] + areas[1][None] - common
    return np.asarray(np.divide(common, union, out=np.zeros_like(common), where=union > 0))


def _right(overlaps: Array, thresholds: Array) -> Array:
    """Whether each prediction, in order, takes a box that is still free: booleans [thresholds, D]."""
    out = np.zeros((len(thresholds), len(overlaps)), bool)
    for k, threshold in enumerate(thresholds):
        free = np.ones(overlaps.shape[1], bool)
        for guess in np.flatnonzero((overlaps >= threshold).any(axis=1)):
            row = np.where(free, overlaps[guess], -1.0)
            # The last of equal ones, as in COCO's evaluation.
            best = row.size - 1 - int(row[::-1].argmax())
            if row[best] >= threshold:
                free[best], out[k, guess] = False, True
    return out
