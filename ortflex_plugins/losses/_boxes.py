"""Shared by the losses of detection: formulas of boxes (x1, y1, x2, y2), which are in the last axis.

The functions take four coordinates of shapes that broadcast, so pairs of boxes and anchors, [N, M, A],
are never loops.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from onnx import TensorProto

from ortflex_core import Array, Ops, Tensor

Corners: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""The coordinates x1, y1, x2, y2 of boxes."""


def corners(op: Ops, boxes: Tensor) -> Corners:
    """The four numbers of the last axis, which disappears."""
    x1, y1, x2, y2 = (op.Gather(boxes, op.constant(k), axis=-1) for k in range(4))
    return x1, y1, x2, y2


def expanded(op: Ops, boxes: Corners, axis: int) -> Corners:
    """The coordinates with a new axis."""
    x1, y1, x2, y2 = (op.Unsqueeze(c, axes=[axis]) for c in boxes)
    return x1, y1, x2, y2


def stacked(op: Ops, boxes: Corners) -> Tensor:
    """The coordinates as the last axis of one tensor."""
    return op.Concat(*(op.Unsqueeze(c, axes=[-1]) for c in boxes), axis=-1)


def intersection_over_union(op: Ops, first: Corners, second: Corners, eps: float = 0.0) -> Tensor:
    """The area of the intersection divided by that of the union."""
    ax1, ay1, ax2, ay2 = first
    bx1, by1, bx2, by2 = second
    width = op.Max(op.Min(ax2, bx2) - op.Max(ax1, bx1), 0.0)
    height = op.Max(op.Min(ay2, by2) - op.Max(ay1, by1), 0.0)
    common = width * height
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - common
    return common / (union + eps if eps else union)


def complete_iou(op: Ops, first: Corners, second: Corners, eps: float = 1e-7) -> Tensor:
    """CIoU: IoU − ρ²/c² − α·v, for boxes ``second`` whose gradient is not used in α.

    ρ is the distance of the centers, c the diagonal of the smallest box around both,
    ``v = 4/π²·(atan(w₁/h₁) − atan(w₂/h₂))²`` and ``α = v / (1 − IoU + v)``, a constant for the gradient.

    Source: Z. Zheng et al., "Distance-IoU loss" (arXiv 1911.08287).
    """
    ax1, ay1, ax2, ay2 = first
    bx1, by1, bx2, by2 = second
    iou = intersection_over_union(op, first, second, eps)
    across = op.Max(ax2, bx2) - op.Min(ax1, bx1)
    down = op.Max(ay2, by2) - op.Min(ay1, by1)
    dx, dy = ax1 + ax2 - bx1 - bx2, ay1 + ay2 - by1 - by2
    centers = 0.25 * (dx * dx + dy * dy)
    angle = op.Atan((ax2 - ax1) / (ay2 - ay1 + eps)) - op.Atan((bx2 - bx1) / (by2 - by1 + eps))
    v = (4 / math.pi**2) * angle * angle
    alpha = op.stop_gradient(v / (1 - iou + v + eps))
    return iou - centers / (across * across + down * down + eps) - alpha * v


def encoded(op: Ops, boxes: Corners, anchors: Corners, weights: tuple[float, ...]) -> Tensor:
    """Boxes relative to anchors: ``w·((x − xₐ)/wₐ, (y − yₐ)/hₐ, log(w/wₐ), log(h/hₐ))``, centers and sizes.

    Source: R. Girshick et al., R-CNN (arXiv 1311.2524), appendix C; torchvision's BoxCoder.
    """
    x1, y1, x2, y2 = boxes
    ax1, ay1, ax2, ay2 = anchors
    width, height = ax2 - ax1, ay2 - ay1
    parts = (
        0.5 * (x1 + x2 - ax1 - ax2) / width,
        0.5 * (y1 + y2 - ay1 - ay2) / height,
        op.Log((x2 - x1) / width),
        op.Log((y2 - y1) / height),
    )
    together = op.Concat(*(op.Unsqueeze(p, axes=[-1]) for p in parts), axis=-1)
    if set(weights) == {1.0}:
        return together
    return together * op.Cast(op.constant(np.asarray(weights)), to=together.dtype)


def of_rows(op: Ops, table: Tensor, places: Tensor) -> Tensor:
    """Entries of a table [N, M, …] at places [N, …]: each row of the batch reads its own entries."""
    return op.GatherND(table, op.Unsqueeze(places, axes=[-1]), batch_dims=1)


def count(op: Ops, x: Tensor, axis: int) -> Tensor:
    """The size of an axis as an int64 tensor [1]."""
    assert x.shape is not None
    size = x.shape[axis]
    return (
        op.constant([size])
        if isinstance(size, int)
        else op.Gather(op.Shape(x), op.constant([axis]))
    )


def numbered(op: Ops, x: Tensor, axis: int) -> Tensor:
    """0, 1, … along an axis, as int64 [size]."""
    return op.Range(op.constant(0), op.Squeeze(count(op, x, axis)), op.constant(1))


def ranks(op: Ops, values: Tensor) -> Tensor:
    """The place of each value [N, A] among its row's in descending order; of equal ones, in order."""
    _, order = op.TopK(values, count(op, values, 1), axis=1, outputs=2)
    places = numbered(op, values, 1)
    return op.ScatterElements(order, order, op.Expand(places, op.Shape(order)), axis=1)


def class_numbers(op: Ops, labels: Tensor) -> Tensor:
    """The classes of labels [N, M, 5] as integers; padding has −1."""
    return op.Cast(op.Gather(labels, op.constant(4), axis=-1), to=TensorProto.INT64)


def nms(boxes: Array, scores: Array, labels: Array, threshold: float) -> Array:
    """The indices of the boxes that non-maximum suppression keeps, by descending score.

    A box is removed if its IoU with a kept box of its class and a higher score is above ``threshold``.
    """
    order = np.argsort(-scores, kind="stable")
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = []
    while order.size:
        first, order = order[0], order[1:]
        kept.append(first)
        low = np.maximum(boxes[first, :2], boxes[order, :2])
        high = np.minimum(boxes[first, 2:], boxes[order, 2:])
        common = np.prod(np.clip(high - low, 0, None), axis=1)
        union = area[first] + area[order] - common
        iou = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
        order = order[(iou <= threshold) | (labels[order] != labels[first])]
    return np.asarray(kept, np.int64)
