"""Losses of object detection: ``ssd`` and ``retinanet`` for anchors, ``task_aligned`` without anchors.

Their labels are the boxes of each image, [N, M, 5]: x1, y1, x2, y2 in pixels and the number of the
class. An image with fewer than M boxes has rows of −1; :func:`pad_boxes` makes such an array from lists.
The assignment of boxes to the places of the head is part of the graph: broadcasting, no loops.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import attrs
import numpy as np

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    Tensor,
    TensorSpec,
    float_scores,
    hyper,
    is_count,
    is_number,
    number,
    one_of,
    setting,
    shape_text,
)
from ortflex_plugins.losses import _boxes as geometry
from ortflex_plugins.losses._classes import Specs, Tensors, is_class

PADDING = -1
"""The class of a row that stands for no box."""


def pad_boxes(boxes: Iterable[Any], classes: Iterable[Any] | None = None) -> Array:
    """Convert lists of boxes into one array, the labels of the losses for object detection.

    Images may have different numbers of boxes. An image that has fewer boxes than the array has places
    for them is padded with rows of −1, which the losses ignore.

    Args:
        boxes: one item for each of the N images: its boxes as an array [m, 4] with x1, y1, x2, y2 in
            pixels, or [] if it has none. Without ``classes``, each item is a mapping with the keys
            ``boxes`` and ``labels``, as in the datasets of torchvision.
        classes: one item for each image: the class indices of its boxes, [m].

    Returns:
        A float32 array [N, M, 5]. A row is x1, y1, x2, y2 and the class index. M is the largest number
        of boxes in an image, and at least 1.

    Raises:
        DataError: ``boxes`` and ``classes`` have different lengths, an image has different numbers of
            boxes and class indices, a box does not have four numbers, or ``classes`` is missing.

    Example:
        >>> labels = pad_boxes([[[0, 0, 4, 4], [2, 2, 6, 8]], []], [[1, 0], []])
        >>> labels.shape
        (2, 2, 5)
        >>> labels[0].tolist()
        [[0.0, 0.0, 4.0, 4.0, 1.0], [2.0, 2.0, 6.0, 8.0, 0.0]]
        >>> labels[1, 0].tolist()
        [-1.0, -1.0, -1.0, -1.0, -1.0]

    Source: the format of the boxes is that of ``torchvision.models.detection``.
    """
    images: list[Any] = list(boxes)
    numbers: list[Any] = [] if classes is None else list(classes)
    if classes is None:
        if not all(isinstance(t, Mapping) and {"boxes", "labels"} <= set(t) for t in images):
            raise DataError(
                "pad_boxes: expected boxes and classes, or one mapping with the keys 'boxes' and "
                "'labels' for each image"
            )
        images, numbers = [t["boxes"] for t in images], [t["labels"] for t in images]
    if len(images) != len(numbers):
        raise DataError(f"pad_boxes: {len(images)} images have boxes, {len(numbers)} have classes")
    out = np.full((len(images), max([1, *map(len, images)]), 5), PADDING, np.float32)
    for k, (own, kinds) in enumerate(zip(images, numbers, strict=True)):
        rows, columns = np.asarray(own, np.float32), np.asarray(kinds).reshape(-1)
        if rows.size and (rows.ndim != 2 or rows.shape[1] != 4):
            raise DataError(
                f"pad_boxes: the boxes of image {k} have the shape {shape_text(rows.shape)}, expected "
                "[m, 4]: x1, y1, x2, y2"
            )
        if len(rows) != len(columns):
            raise DataError(
                f"pad_boxes: image {k} has {len(rows)} boxes, but {len(columns)} class indices"
            )
        if rows.size:
            out[k, : len(rows), :4], out[k, : len(rows), 4] = rows, columns
    return out


def _numbers(values: Any) -> Any:
    return tuple(values.tolist() if isinstance(values, np.ndarray) else values)


def _positive(count: int | None, whole: bool = False) -> Any:
    """A validator of numbers above 0, a given number of them."""
    fits = is_count if whole else is_number

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        good = len(value) > 0 and all(fits(v) and v > 0 for v in value)
        if not good or (count is not None and len(value) != count):
            raise ValueError(
                f"{type(instance).__name__}.{attribute.name} must be "
                f"{'numbers' if count is None else f'{count} numbers'} > 0, got {value!r}"
            )

    return check


def _image_size(**settings: Any) -> Any:
    check = _positive(2, whole=True)
    optional = settings.get("default", 0) is None
    return setting(
        converter=attrs.converters.optional(_numbers) if optional else _numbers,
        validator=attrs.validators.optional(check) if optional else check,
        **settings,
    )


# Fields whose defaults differ between the losses.


def _least_score(default: float) -> Any:
    text = "the score below which predicted boxes are discarded"
    return setting(default=default, validator=number(ge=0, lt=1), help=text)


def _most_overlap(default: float) -> Any:
    text = "the IoU above which only the better of two predicted boxes of a class is kept"
    return setting(default=default, validator=number(ge=0, le=1), help=text)


def _factors(*default: float) -> Any:
    text = "the factors of x, y, width and height in the encoded boxes"
    return setting(default=default, converter=_numbers, validator=_positive(4), help=text)


def _distance(default: str) -> Any:
    text = "the regression loss of the encoded boxes"
    return setting(default=default, validator=one_of("smooth_l1", "l1"), help=text)


@attrs.frozen(kw_only=True)
class DetectionLoss(Loss[Tensors, Specs], abc.ABC):
    """What the losses of detection share: labels, the mean, and the boxes that a model predicts."""

    first_class: ClassVar[int] = 0
    """The number of the first class in the labels; 1 if class 0 is the background."""

    normalize: Literal["image", "batch"] = setting(
        default="image",
        validator=one_of("image", "batch"),
        help="whether the loss is normalized for each image separately or over the whole batch",
    )
    score_thresh: float = _least_score(0.05)
    nms_thresh: float = _most_overlap(0.5)
    topk_candidates: int = setting(
        default=1000,
        validator=number(ge=1),
        help="the maximum number of predicted boxes before non-maximum suppression",
    )
    detections_per_img: int = setting(
        default=100, validator=number(ge=1), help="the maximum number of predicted boxes per image"
    )

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of the images, if they are known."""
        return None

    @abc.abstractmethod
    def check_heads(self, shapes: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse tensors whose shapes do not fit each other.

        Raises:
            DataError: which tensor, its shape, and the expected one.
        """

    @abc.abstractmethod
    def candidates(self, outputs: Mapping[str, Array]) -> tuple[Array, Array]:
        """The scores [N, A, C] and boxes [N, A, 4] of every place of the head."""

    def label(self, predicted: Specs, given: TensorSpec | None) -> TensorSpec:
        """Boxes and classes [N, M, 5], in the type of the scores."""
        shapes: dict[str, tuple[Any, ...]] = {}
        for key, spec in predicted.items():
            float_scores(self.name, spec)
            if spec.shape is None:
                raise DataError(f"{self.name}: the shape of the {key} {spec} is unknown")
            shapes[key] = spec.shape
        if not isinstance(shapes["logits"][-1], int) or len(shapes["logits"]) != 3:
            raise DataError(
                f"{self.name}: the logits must have the shape [N, places, classes] with a known "
                f"number of classes, got {predicted['logits']}"
            )
        self.check_heads(shapes)
        if given is not None and given.shape is not None:
            shape = given.shape
            if len(shape) != 3 or shape[2] != 5 or shape[1] == 0:
                raise DataError(
                    f"{self.name}: labels must be the boxes of each image, [N, M, 5] (x1, y1, x2, y2, "
                    f"class; rows of −1 for no box), got {given}; ortflex.pad_boxes(boxes, classes) "
                    "makes them from lists"
                )
        return TensorSpec("expected", predicted["logits"].dtype, (shapes["logits"][0], "boxes", 5))

    def check_labels(self, predicted: Specs, labels: Array) -> None:
        """Refuse empty boxes, boxes outside of the image, and classes that the head does not have."""
        shape = predicted["logits"].shape
        last = shape[-1] - 1 if shape is not None and isinstance(shape[-1], int) else math.inf
        boxes, classes = labels[..., :4], labels[..., 4]
        real = classes != PADDING

        def refuse(wrong: Array, what: str) -> None:
            wrong = wrong & real
            if wrong.any():
                row, place = (int(k) for k in np.argwhere(wrong)[0])
                raise DataError(
                    f"{self.name}: {what.format(box=boxes[row, place].tolist(), cls=classes[row, place])} "
                    f"(row {row}, box {place}; {int(wrong.sum())} of {int(real.sum())} boxes)"
                )

        hint = "" if self.first_class == 0 else "; 0 is the background"
        bad_class = (classes < self.first_class) | (classes > last) | (classes != np.floor(classes))
        refuse(
            np.asarray(bad_class),
            f"the class must be a whole number from {self.first_class} to {last}{hint}, and −1 for a "
            "row without a box, but it is {cls:g}. Another number of classes needs a new head",
        )
        empty = (boxes[..., 2] <= boxes[..., 0]) | (boxes[..., 3] <= boxes[..., 1])
        refuse(
            np.asarray(empty),
            "a box must be x1, y1, x2, y2 with x1 < x2 and y1 < y2, but it is {box}; boxes as x, y, "
            "width, height must be converted, and empty ones left out",
        )
        if self.size is not None:
            height, width = self.size
            outside = (boxes[..., 0] >= width) | (boxes[..., 1] >= height)
            outside |= (boxes[..., 2] <= 0) | (boxes[..., 3] <= 0)
            refuse(
                np.asarray(outside),
                "the box {box} is outside of the image, whose "
                f"(height, width) is ({height}, {width}); labels are in pixels of the resized image",
            )

    def mean(self, op: Ops, total: Tensor, matches: Tensor) -> Tensor:
        """The totals [N] of the images, divided by their matches [N] or by those of the batch."""
        if self.normalize == "image":
            return total / op.Max(matches, 1.0)
        rows = op.Cast(op.Squeeze(geometry.count(op, matches, 0)), to=total.dtype)
        return total * (rows / op.Max(op.ReduceSum(matches, keepdims=0), 1.0))

    def predictions(self, predicted: Mapping[str, Array]) -> Array:
        """The boxes that the heads predict: [N, D, 6], x1, y1, x2, y2, score, class.

        By descending score, after non-maximum suppression in each class; rows of −1 after the last
        box. D is ``detections_per_img``. ``predicted`` has the arrays of the loss's tensors.
        """
        scores, boxes = self.candidates(predicted)
        out = np.full((len(scores), self.detections_per_img, 6), PADDING, scores.dtype)
        for k, (own, places) in enumerate(zip(scores, boxes, strict=True)):
            place, kind = np.nonzero(own > self.score_thresh)
            best = np.argsort(-own[place, kind], kind="stable")[: self.topk_candidates]
            place, kind = place[best], kind[best]
            found = np.concatenate(
                [places[place], own[place, kind, None], kind[:, None] + self.first_class], axis=1
            )
            if self.size is not None:
                height, width = self.size
                found[:, :4] = np.clip(found[:, :4], 0, [width, height, width, height])
            kept = geometry.nms(found[:, :4], found[:, 4], kind, self.nms_thresh)
            kept = kept[: self.detections_per_img]
            out[k, : len(kept)] = found[kept]
        return out


class _Matches(NamedTuple):
    """What each anchor has to predict: shapes [N, A]; ``boxes`` is [N, A, 4], relative to the anchors."""

    found: Tensor
    ignored: Tensor
    classes: Tensor
    boxes: Tensor


@attrs.frozen(kw_only=True)
class AnchorLoss(DetectionLoss, abc.ABC):
    """Boxes are matched to anchors by IoU; each matched anchor learns a class and a relative box."""

    tensors: ClassVar[tuple[str, ...]] = ("logits", "boxes", "anchors")

    image_size: tuple[int, int] | None = _image_size(
        default=None,
        help="the height and width of the images, used to reject labels outside the image and to "
        "clip predicted boxes",
    )
    box_weights: tuple[float, ...] = _factors(1.0, 1.0, 1.0, 1.0)
    box_loss: Literal["smooth_l1", "l1"] = _distance("l1")

    @property
    def size(self) -> tuple[int, int] | None:
        return self.image_size

    def check_heads(self, shapes: Mapping[str, tuple[Any, ...]]) -> None:
        """Logits [N, A, K], boxes [N, A, 4], anchors [A, 4], the same A."""
        for key, rank in (("boxes", 3), ("anchors", 2)):
            ranks = (rank, 3)
            if len(shapes[key]) not in ranks or shapes[key][-1] != 4:
                wanted = "[N, A, 4]" if key == "boxes" else "[A, 4]"
                raise DataError(
                    f"{self.name}: {key} must have the shape {wanted}, got {shape_text(shapes[key])}"
                )
            counts = shapes["logits"][1], shapes[key][-2]
            if all(isinstance(c, int) for c in counts) and counts[0] != counts[1]:
                raise DataError(
                    f"{self.name}: the logits {shape_text(shapes['logits'])} have {counts[0]} anchors, "
                    f"but {key} {shape_text(shapes[key])} have {counts[1]}; the anchors must be made "
                    "for the size of image that the model was exported with"
                )

    @abc.abstractmethod
    def assign(self, op: Ops, iou: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The box of each anchor, which anchors are matched, and which are ignored, all [N, A].

        ``iou`` [N, M, A] is −1 for padding; ``real`` [N, M, 1] marks the boxes.
        """

    @abc.abstractmethod
    def classification(self, op: Ops, logits: Tensor, matches: _Matches, count: Tensor) -> Tensor:
        """The loss of the classes of each image, [N]; ``count`` [N] are its matched anchors."""

    def matches(self, op: Ops, anchors: Tensor, expected: Tensor) -> _Matches:
        """The assignment; a constant for the gradient."""
        anchors = op.stop_gradient(op.Cast(anchors, to=expected.dtype))
        own = geometry.corners(op, anchors)
        pairs = geometry.expanded(op, own, -2)  # [1, A], or [N, 1, A]
        boxes = geometry.expanded(op, geometry.corners(op, expected), -1)
        real = op.GreaterOrEqual(op.Gather(expected, op.constant([4]), axis=-1), 0.0)
        iou = op.Where(real, geometry.intersection_over_union(op, boxes, pairs), -1.0)
        place, found, ignored = self.assign(op, iou, real)
        target = geometry.of_rows(op, expected, place)
        relative = geometry.encoded(op, geometry.corners(op, target), own, self.box_weights)
        chosen = op.Unsqueeze(found, axes=[-1])
        return _Matches(
            found,
            ignored,
            op.Where(found, geometry.class_numbers(op, target), PADDING),
            # The size of padding has no logarithm, and 0 · NaN would be the gradient.
            op.Where(chosen, relative, 0.0),
        )

    def per_sample(self, op: Ops, predicted: Tensors, expected: Tensor) -> Tensor:
        """The losses of classes and boxes, divided by the number of matched anchors."""
        matches = self.matches(op, predicted["anchors"], expected)
        count = op.ReduceSum(op.Cast(matches.found, to=expected.dtype), axes=[1], keepdims=0)
        distance = op.Abs(predicted["boxes"] - matches.boxes)
        if self.box_loss == "smooth_l1":
            distance = op.Where(distance < 1.0, 0.5 * distance * distance, distance - 0.5)
        chosen = op.Where(op.Unsqueeze(matches.found, axes=[-1]), distance, 0.0)
        boxes = op.ReduceSum(chosen, axes=[1, 2], keepdims=0)
        classes = self.classification(op, predicted["logits"], matches, count)
        return self.mean(op, classes + boxes, count)

    def decoded(self, outputs: Mapping[str, Array]) -> Array:
        """Boxes [N, A, 4] in pixels; sizes of more than 1000/16 times the anchor's are bounded."""
        relative = outputs["boxes"] / np.asarray(self.box_weights, outputs["boxes"].dtype)
        anchors = outputs["anchors"].astype(relative.dtype)
        sizes = anchors[..., 2:] - anchors[..., :2]
        centers = anchors[..., :2] + sizes / 2 + relative[..., :2] * sizes
        half = sizes / 2 * np.exp(np.minimum(relative[..., 2:], math.log(1000 / 16)))
        return np.concatenate([centers - half, centers + half], axis=-1)


@attrs.frozen(kw_only=True)
class Ssd(AnchorLoss):
    """The loss of SSD: softmax cross-entropy with hard negative mining plus a box regression loss.

    For N images, A anchors and K classes, the loss reads ``logits`` [N, A, K], in which class 0 is the
    background, and ``boxes`` [N, A, 4] relative to the ``anchors`` [A, 4]. The anchors are boxes x1, y1,
    x2, y2 in pixels, and can be a constant output or another tensor of the model. An anchor is matched
    to the box with the highest IoU if this IoU is at least ``fg_iou_thresh``. In addition, the best
    anchor of each box is matched to that box, even if their IoU is below this threshold. If several
    boxes have the same best anchor, it is matched to the last of them. With n matched anchors in an image,

    ``l = (Σ_matched [CE(logits, class) + |boxes − encode(box)|] + Σ_hard CE(logits, 0)) / max(n, 1)``

    where |·| is ``box_loss``, and the hard anchors are the ``neg_to_pos_ratio``·n unmatched anchors with
    the highest loss. ``encode`` is ``(Δx/wₐ, Δy/hₐ, log(w/wₐ), log(h/hₐ))``, multiplied by the factors
    ``box_weights``. Here, Δx and Δy are the offsets of the box's center from the anchor's center, w and
    h are the width and height of the box, and wₐ and hₐ are those of the anchor. The loss values have
    the shape [N]. ``normalize="batch"`` divides by the number of matches in the whole batch, as
    torchvision does.

    Labels have the shape [N, M, 5]: x1, y1, x2, y2 and a class in 1 … K−1, or the class −1 for rows
    that pad an image with fewer than M boxes (``pad_boxes``). An image without boxes has a loss of 0.

    Raises:
        DataError: tensors with different numbers of anchors; labels of another shape, empty boxes,
            boxes outside of ``image_size``, classes that the head does not have.

    >>> Ssd(image_size=(300, 300)).describe()["neg_to_pos_ratio"]
    3.0

    Source: W. Liu et al., "SSD: single shot multibox detector" (2016); torchvision's SSD.
    """

    name: ClassVar[str] = "ssd"
    first_class: ClassVar[int] = 1

    fg_iou_thresh: float = setting(
        default=0.5,
        validator=number(gt=0, le=1),
        help="the minimum IoU at which an anchor is matched to a box",
    )
    neg_to_pos_ratio: float = hyper(
        default=3.0,
        validator=number(ge=0),
        help="the number of background anchors per matched anchor",
    )
    box_weights: tuple[float, ...] = _factors(10.0, 10.0, 5.0, 5.0)
    box_loss: Literal["smooth_l1", "l1"] = _distance("smooth_l1")
    score_thresh: float = _least_score(0.01)
    nms_thresh: float = _most_overlap(0.45)

    def assign(self, op: Ops, iou: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """IoU of at least the threshold; and the best anchor of each box, the last box deciding."""
        best = op.ArgMax(iou, axis=2, keepdims=1)
        anchors = geometry.numbered(op, iou, 2)
        forced = op.And(op.Equal(anchors, best), op.ReduceMax(iou, axes=[2], keepdims=1) > 0.0)
        boxes = op.Unsqueeze(geometry.numbered(op, iou, 1), axes=[-1])
        last = op.ReduceMax(op.Where(forced, boxes, -1), axes=[1], keepdims=0)
        is_forced = op.GreaterOrEqual(last, 0)
        found = op.Or(is_forced, op.ReduceMax(iou, axes=[1], keepdims=0) >= self.fg_iou_thresh)
        place = op.Where(is_forced, last, op.ArgMax(iou, axis=1, keepdims=0))
        return place, found, op.And(found, op.Not(found))

    def classification(self, op: Ops, logits: Tensor, matches: _Matches, count: Tensor) -> Tensor:
        """Cross-entropy of the matched anchors and of the hardest of the others."""
        classes = op.Where(matches.found, matches.classes, 0)
        logs = op.LogSoftmax(logits, axis=-1)
        chosen = op.Where(is_class(op, logits, classes, -1), logs, 0.0)
        entropy = -op.ReduceSum(chosen, axes=[-1], keepdims=0)
        others = op.Where(matches.found, -math.inf, op.stop_gradient(entropy))
        rank = op.Cast(geometry.ranks(op, others), to=logits.dtype)
        wanted = op.Unsqueeze(self.neg_to_pos_ratio * count, axes=[1])
        # Where fewer anchors are left than wanted, the last ranks are those of matched anchors.
        used = op.Or(matches.found, rank < wanted)
        return op.ReduceSum(op.Where(used, entropy, 0.0), axes=[1], keepdims=0)

    def candidates(self, outputs: Mapping[str, Array]) -> tuple[Array, Array]:
        """Softmax, without the background."""
        logits = outputs["logits"]
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return (powers / powers.sum(axis=-1, keepdims=True))[..., 1:], self.decoded(outputs)


@attrs.frozen(kw_only=True)
class RetinaNet(AnchorLoss):
    """The loss of RetinaNet: focal loss of the anchors plus a regression loss of the matched boxes.

    For N images, A anchors and K classes, the loss reads ``logits`` [N, A, K] and ``boxes`` [N, A, 4]
    relative to the ``anchors`` [A, 4]. The anchors are boxes x1, y1, x2, y2 in pixels, and can be a
    constant output or another tensor of the model. For each anchor, the loss finds the box with the
    highest IoU. If this IoU is at least ``fg_iou_thresh``, the anchor is matched to this box. If it is
    below ``bg_iou_thresh``, the anchor is background. Between the two thresholds, the anchor is ignored.
    There is one exception: for each box, the anchors that have the highest IoU with it are matched even
    if this IoU is below the thresholds. If such an anchor has a higher IoU with another box, it is
    matched to that box. With n matched anchors in an image,

    ``l = (Σ_anchors focal(logits, one-hot class) + Σ_matched |boxes − encode(box)|) / max(n, 1)``

    where the first sum omits the ignored anchors, |·| is ``box_loss``, and ``encode`` is the same as for
    ``ssd``. The loss values have the shape [N]. Labels have the shape [N, M, 5]: x1, y1, x2, y2 and a
    class in 0 … K−1, or the class −1 for rows that pad an image with fewer than M boxes
    (``pad_boxes``). For an image without boxes, all anchors are background.

    Raises:
        DataError: tensors with different numbers of anchors; labels of another shape, empty boxes,
            boxes outside of ``image_size``, classes that the head does not have.

    >>> RetinaNet(image_size=(800, 800)).describe()["gamma"]
    2.0

    Source: T.-Y. Lin et al., "Focal loss for dense object detection" (2017); torchvision's RetinaNet.
    """

    name: ClassVar[str] = "retinanet"

    fg_iou_thresh: float = setting(
        default=0.5,
        validator=number(gt=0, le=1),
        help="the minimum IoU at which an anchor is matched to a box",
    )
    bg_iou_thresh: float = setting(
        default=0.4,
        validator=number(ge=0, le=1),
        help="the IoU below which an anchor is background",
    )
    alpha: float = hyper(
        default=0.25,
        validator=number(ge=0, le=1),
        help="the weight of the positive class in the focal loss",
    )
    gamma: float = hyper(
        default=2.0,
        validator=number(ge=1),
        help="the focusing parameter: larger values reduce the weight of well-classified anchors",
    )

    def __attrs_post_init__(self) -> None:
        if self.bg_iou_thresh > self.fg_iou_thresh:
            raise ValueError(
                f"RetinaNet.bg_iou_thresh must be at most fg_iou_thresh ({self.fg_iou_thresh:g}), "
                f"got {self.bg_iou_thresh:g}"
            )

    def assign(self, op: Ops, iou: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The two thresholds; and all best anchors of each box, each with its own best box."""
        top = op.ReduceMax(iou, axes=[2], keepdims=1)
        rescued = op.Cast(op.And(op.Equal(iou, top), top > 0.0), to=iou.dtype)
        quality = op.ReduceMax(iou, axes=[1], keepdims=0)
        kept = op.ReduceMax(rescued, axes=[1], keepdims=0) > 0.5
        found = op.Or(quality >= self.fg_iou_thresh, kept)
        ignored = op.And(op.Not(found), quality >= self.bg_iou_thresh)
        return op.ArgMax(iou, axis=1, keepdims=0), found, ignored

    def classification(self, op: Ops, logits: Tensor, matches: _Matches, count: Tensor) -> Tensor:
        """``−a·(1 − p)^gamma·log p`` of every class, p the probability of the right answer."""
        hit = is_class(op, logits, matches.classes, -1)
        score = op.Where(hit, logits, -logits)
        entropy = op.Max(-score, 0.0) + op.Log(1 + op.Exp(-op.Abs(score)))
        share = op.Cast(hit, to=logits.dtype)
        weight = self.alpha * share + (1 - self.alpha) * (1 - share)
        focal = weight * entropy * op.Sigmoid(-score) ** self.gamma
        each = op.ReduceSum(focal, axes=[-1], keepdims=0)
        return op.ReduceSum(op.Where(matches.ignored, 0.0, each), axes=[1], keepdims=0)

    def candidates(self, outputs: Mapping[str, Array]) -> tuple[Array, Array]:
        """Sigmoid of each class."""
        return _sigmoid(outputs["logits"]), self.decoded(outputs)


@attrs.frozen(kw_only=True)
class TaskAligned(DetectionLoss):
    """Anchor-free detection loss with task-aligned assignment, CIoU and distribution focal loss.

    For each of the ``strides``, the head predicts one box in each cell of a grid with this stride. The
    cells of all grids, row by row and in the order of ``strides``, are the L locations. For N images,
    the head computes ``logits`` [N, L, C] and ``boxes`` [N, L, 4·R]. For each of the sides left, top,
    right and bottom, ``boxes`` contains R logits for the distances 0 … R−1 of this side from the center
    of the cell, in units of the stride. The predicted distance is the mean ``Σ j·softmax_j``.

    The assignment has no gradient. For a box of class c, each location whose center is in the box has
    the score ``t = σ(logit_c)^alpha · IoU^beta``. The ``topk`` locations with the largest t are assigned
    to the box. A location that is assigned to several boxes belongs to the one with the highest IoU. The
    target of class c at an assigned location is ``q = t · max IoU / max t``, where the maxima are
    taken over the locations that belong to the box. All other targets are 0. Then

    ``l = (cls·Σ BCE(logits, q) + Σ_assigned q·[box·(1 − CIoU) + dfl·DFL]) / max(Σ q, 1)``

    where DFL is the cross-entropy of the predicted distribution of a side, averaged over the four sides.
    The target distribution is zero except at the two integers next to the true distance, and its mean is
    this distance. The loss values have the shape [N]. ``normalize="batch"`` divides by the sum of the
    targets of the whole batch.

    Labels have the shape [N, M, 5]: x1, y1, x2, y2 and a class in 0 … C−1, or the class −1 for rows
    that pad an image with fewer than M boxes (``pad_boxes``).

    Raises:
        DataError: heads with another number of places than the strides have in an image of
            ``image_size``; labels of another shape, empty boxes, boxes outside of the image, classes that
            the head does not have.

    >>> TaskAligned(image_size=(64, 64)).places()
    84

    Source: C. Feng et al., "TOOD" (arXiv 2108.07755); Z. Zheng et al. (CIoU, arXiv 1911.08287); X. Li et
    al., "Generalized focal loss" (arXiv 2006.04388).
    """

    name: ClassVar[str] = "task_aligned"
    tensors: ClassVar[tuple[str, ...]] = ("logits", "boxes")

    image_size: tuple[int, int] = _image_size(help="the height and width of the images")
    strides: tuple[int, ...] = setting(
        default=(8, 16, 32),
        converter=_numbers,
        validator=_positive(None, whole=True),
        help="the stride of each grid in pixels, in the order in which the head returns the grids",
    )
    topk: int = setting(
        default=10, validator=number(ge=1), help="the maximum number of locations assigned to a box"
    )
    alpha: float = hyper(
        default=0.5,
        validator=number(ge=0),
        help="the exponent of the class probability in the assignment",
    )
    beta: float = hyper(
        default=6.0, validator=number(ge=0), help="the exponent of the IoU in the assignment"
    )
    box: float = hyper(default=7.5, validator=number(ge=0), help="the factor of the CIoU loss")
    cls: float = hyper(
        default=0.5, validator=number(ge=0), help="the factor of the classification loss"
    )
    dfl: float = hyper(
        default=1.5, validator=number(ge=0), help="the factor of the distribution focal loss"
    )
    score_thresh: float = _least_score(0.001)
    nms_thresh: float = _most_overlap(0.7)

    @property
    def size(self) -> tuple[int, int] | None:
        return self.image_size

    def places(self) -> int:
        """The number of places of the head, L."""
        return sum(rows * columns for rows, columns in self._grids())

    def _grids(self) -> Iterator[tuple[int, int]]:
        height, width = self.image_size
        for stride in self.strides:
            yield -(-height // stride), -(-width // stride)

    def centers(self) -> Array:
        """x, y and stride of every place, [L, 3]."""
        parts = []
        for stride, (rows, columns) in zip(self.strides, self._grids(), strict=True):
            y, x = np.mgrid[:rows, :columns]
            cells = np.stack([x + 0.5, y + 0.5, np.ones(x.shape)], axis=-1)
            parts.append(stride * cells.reshape(-1, 3))
        return np.concatenate(parts)

    def check_heads(self, shapes: Mapping[str, tuple[Any, ...]]) -> None:
        """Logits [N, L, C], boxes [N, L, 4·R], R ≥ 2."""
        boxes = shapes["boxes"]
        if len(boxes) != 3 or not isinstance(boxes[2], int) or boxes[2] % 4 or boxes[2] < 8:
            raise DataError(
                f"{self.name}: boxes must have the shape [N, places, 4·R], R logits for each side, "
                f"got {shape_text(boxes)}"
            )
        for key in self.tensors:
            if isinstance(shapes[key][1], int) and shapes[key][1] != self.places():
                grids = " + ".join(f"{r}·{c}" for r, c in self._grids())
                raise DataError(
                    f"{self.name}: {key} {shape_text(shapes[key])} have {shapes[key][1]} places, but the "
                    f"strides {list(self.strides)} have {grids} = {self.places()} in images of "
                    f"{self.image_size[0]}×{self.image_size[1]}; set image_size= and strides= of the head"
                )

    def per_sample(self, op: Ops, predicted: Tensors, expected: Tensor) -> Tensor:
        """The three losses, weighted by the targets, divided by their sum."""
        logits, dtype = predicted["logits"], predicted["logits"].dtype
        sides = op.Reshape(predicted["boxes"], op.constant([0, 0, 4, _bins(predicted["boxes"])]))
        numbers = op.Cast(op.constant(np.arange(_bins(predicted["boxes"]))), to=dtype)
        distances = op.ReduceSum(op.Softmax(sides, axis=-1) * numbers, axes=[-1], keepdims=0)
        x, y, stride = (op.Cast(op.constant(c), to=dtype) for c in self.centers().T)
        left, top, right, bottom = geometry.corners(op, distances)
        boxes = (x - left * stride, y - top * stride, x + right * stride, y + bottom * stride)
        x1, y1, x2, y2 = map(op.stop_gradient, boxes)
        fixed = (x1, y1, x2, y2)
        place, target = self._assigned(op, op.stop_gradient(logits), fixed, (x, y), expected)

        found = target > 0.0
        labels = geometry.of_rows(op, expected, place)
        hit = is_class(op, logits, geometry.class_numbers(op, labels), -1)
        goal = op.Where(hit, op.Unsqueeze(target, axes=[-1]), 0.0)
        entropy = op.Max(logits, 0.0) - logits * goal + op.Log(1 + op.Exp(-op.Abs(logits)))
        classes = op.ReduceSum(entropy, axes=[1, 2], keepdims=0)

        # A place without a box has its own box as the target, so that nothing is infinite there.
        wanted: Any = [
            op.Where(found, c, own)
            for c, own in zip(geometry.corners(op, labels), fixed, strict=True)
        ]
        overlap = geometry.complete_iou(op, tuple(wanted), boxes)
        x1, y1, x2, y2 = wanted
        exact = (x - x1, y - y1, x2 - x, y2 - y)
        units = geometry.stacked(op, tuple(e / stride for e in exact))
        units = op.Min(op.Max(units, 0.0), _bins(predicted["boxes"]) - 1.01)
        near = op.Max(1 - op.Abs(op.Unsqueeze(units, axes=[-1]) - numbers), 0.0)
        spread = -op.ReduceSum(near * op.LogSoftmax(sides, axis=-1), axes=[2, 3], keepdims=0) / 4
        each = target * (self.box * (1 - overlap) + self.dfl * spread)
        total = self.cls * classes + op.ReduceSum(each, axes=[1], keepdims=0)
        return self.mean(op, total, op.ReduceSum(target, axes=[1], keepdims=0))

    def _assigned(
        self,
        op: Ops,
        logits: Tensor,
        boxes: geometry.Corners,
        center: tuple[Tensor, Tensor],
        expected: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The box of each place and the target of its class, [N, L]; the target is 0 without a box."""
        given = geometry.expanded(op, geometry.corners(op, expected), -1)
        classes = geometry.class_numbers(op, expected)
        x1, y1, x2, y2 = given
        x, y = center
        near = op.Min(x - x1, y - y1, x2 - x, y2 - y) > 0.0
        inside = op.And(near, op.Unsqueeze(op.GreaterOrEqual(classes, 0), axes=[-1]))
        iou = geometry.intersection_over_union(op, given, geometry.expanded(op, boxes, 1), 1e-9)
        by_class = op.Transpose(logits, perm=[0, 2, 1])
        scores = op.Sigmoid(geometry.of_rows(op, by_class, op.Max(classes, 0)))
        fit = op.Where(inside, scores**self.alpha * iou**self.beta, 0.0)
        size = min(self.topk, self.places())
        _, first = op.TopK(fit, op.constant([size]), axis=2, outputs=2)
        zeros = op.Expand(op.Cast(op.constant(0.0), to=fit.dtype), op.Shape(fit))
        ones = op.Expand(op.Cast(op.constant(1.0), to=fit.dtype), op.Shape(first))
        among = op.And(op.ScatterElements(zeros, first, ones, axis=2) > 0.5, inside)
        place = op.ArgMax(op.Where(among, iou, -1.0), axis=1, keepdims=0)
        numbers = op.Unsqueeze(geometry.numbered(op, iou, 1), axes=[-1])
        own = op.And(among, op.Equal(numbers, op.Unsqueeze(place, axes=[1])))
        fit, iou = op.Where(own, fit, 0.0), op.Where(own, iou, 0.0)
        top = op.ReduceMax(fit, axes=[2], keepdims=1)
        scale = op.ReduceMax(iou, axes=[2], keepdims=1) / op.Where(top > 0.0, top, 1.0)
        return place, op.ReduceMax(fit * scale, axes=[1], keepdims=0)

    def candidates(self, outputs: Mapping[str, Array]) -> tuple[Array, Array]:
        """Sigmoid of each class; centers and mean distances."""
        sides = outputs["boxes"].reshape(*outputs["boxes"].shape[:2], 4, -1)
        powers = np.exp(sides - sides.max(axis=-1, keepdims=True))
        bins = np.arange(sides.shape[-1], dtype=sides.dtype)
        distances = (powers * bins).sum(axis=-1) / powers.sum(axis=-1)
        centers = self.centers().astype(sides.dtype)
        distances *= centers[:, 2:]
        low, high = centers[:, :2] - distances[..., :2], centers[:, :2] + distances[..., 2:]
        return _sigmoid(outputs["logits"]), np.concatenate([low, high], axis=-1)


def _bins(boxes: Tensor) -> int:
    """The numbers of a side's distribution, R."""
    count = (boxes.shape or (None,))[-1]
    assert isinstance(count, int)  # check_heads() refuses an unknown number
    return count // 4


def _sigmoid(scores: Array) -> Array:
    return np.asarray(np.exp(-np.logaddexp(0, -scores)), scores.dtype)
