"""Draws of the standard's losses and of quantization."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np

from ortflex_core import Array
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import F32, Draw, Draws, drawn, numbers, random, shapes, torch

DRAWS = Draws()


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _picked(scores: Array, labels: Array, weight: Any, ignored: int | None, how: str) -> Array:
    keep = np.ones(labels.shape, bool) if ignored is None else labels != ignored
    labels = np.where(keep, labels, 0)
    w = (np.ones(scores.shape[1]) if weight is None else weight)[labels] * keep
    rows = -w * np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    if how == "none":
        return rows
    return np.asarray(rows.sum() / (w.sum() if how == "mean" else 1))


@DRAWS.of("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def likelihood(draw: Draw, operator: str) -> Case:
    rows, classes, behind = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(shapes(0, 2))
    how = draw(st.sampled_from(["mean", "sum", "none"]))
    labels = random(draw).integers(0, classes, (rows, *behind))
    ignored = draw(st.none() | st.sampled_from([-1, 0, classes - 1]))
    if ignored is not None:
        labels.reshape(-1)[1:][:1] = ignored
        if classes > 1:  # a mean over nothing is no number
            labels.reshape(-1)[0] = (ignored + 1) % classes
        elif ignored == 0:
            ignored = None
    options: dict[str, Any] = {"reduction": how}
    if ignored is not None:
        options["ignore_index"] = ignored
    if draw(st.booleans()):
        labels = labels.astype(np.int32)
    arrays = {"x": numbers(draw, (rows, classes, *behind)), "t": labels}
    # The loss, the logarithms that the second operator gives too, or both.
    used = "loss"
    if operator == "SoftmaxCrossEntropyLoss":
        used = draw(st.sampled_from(["loss", "both", "logs"]))
    if used != "logs" and not draw(st.booleans()):
        arrays["w"] = numbers(draw, (classes,), 0.5, 2.0, salt=1)

    def formula(op: Any, x: Any, t: Any, w: Any = None) -> Any:
        if used == "loss":
            return op(operator, x, t, w, **options)
        loss, logs = op(operator, x, t, w, outputs=2, **options)
        squares = op.ReduceSum(logs * logs, keepdims=0)
        return squares if used == "logs" else op.ReduceSum(loss, keepdims=0) + squares

    def value(loss: Any, scores: Any) -> Any:
        if used == "loss":
            return loss
        squares = (scores**2).sum()
        return squares if used == "logs" else loss.sum() + squares

    def oracle(x: Array, t: Array, w: Array | None = None) -> Array:
        scores = x if operator.startswith("Neg") else _log_softmax(x)
        return np.asarray(value(_picked(scores, t, w, ignored, how), scores))

    def in_torch(x: Any, t: Any, w: Any = None) -> Any:
        scores = x if operator.startswith("Neg") else torch.log_softmax(x, 1)
        # Its own passes nothing to the weights.
        keep = torch.ones(t.shape, dtype=torch.bool) if ignored is None else t != ignored
        place = torch.where(keep, t, 0).long()
        weight = (torch.ones(classes).double() if w is None else w)[place] * keep
        loss = -weight * scores.gather(1, place[:, None])[:, 0]
        if how != "none":
            loss = loss.sum() / (weight.sum() if how == "mean" else 1)
        return value(loss, scores)

    return drawn(
        f"{operator} {options} uses {used} {labels.tolist()}",
        formula,
        arrays,
        oracle=oracle,
        torch=in_torch,
        needs_rank=True,
        dtypes=F32,
    )


RANGES = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535)}


def scaling(draw: Draw) -> tuple[tuple[int, ...], int | None, tuple[int, ...]]:
    """A shape, the axis of the scales or None for a single one, and the scales' shape."""
    shape = draw(shapes(1, 3))
    if draw(st.booleans()):
        return shape, None, draw(st.sampled_from([(), (1,)]))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return shape, axis, (shape[axis],)


def spread(values: Any, shape: tuple[int, ...], axis: int | None) -> Any:
    if axis is None:
        return values.reshape(-1)[0]
    size = [1] * len(shape)
    size[axis] = shape[axis]
    return values.reshape(size)


@DRAWS.of("QuantizeLinear")
def quantize(draw: Draw, operator: str) -> Case:
    """There and back: straight through, where nothing saturates; and its scales, as torch has them."""
    shape, axis, size = scaling(draw)
    kind = draw(st.sampled_from(["int8", "uint8", "int16", "uint16"]))
    low, high = RANGES[kind]
    scales = numbers(draw, size, 0.004, 0.03, salt=1)
    zeros = np.zeros(size, kind) + draw(st.integers(0, 9))
    zeros = zeros.astype(kind)
    scales = scales.astype(np.float32)
    options = {} if axis is None else {"axis": axis}
    since = 21 if kind.endswith("16") else 13
    plain = not zeros.any() and draw(st.booleans()) and kind == "uint8"

    def formula(op: Any, x: Any) -> Any:
        zero = None if plain else op.constant(zeros)
        scale = op.constant(scales)
        q = op.QuantizeLinear(x, scale, zero, **options)
        return op.DequantizeLinear(q, scale, zero, **options)

    s, z = (spread(v.astype(float), shape, axis) for v in (scales, zeros))
    return drawn(
        f"QuantizeLinear {kind} {options} {zeros.tolist()}",
        formula,
        {"x": numbers(draw, shape)},
        # What the pair stands for is clipping to the range of the type.
        oracle=lambda x: np.where(
            (np.round(x / s) + z >= low) & (np.round(x / s) + z <= high), x, 0.0
        ),
        since=since,
        needs_rank=True,
        dtypes=F32,
    )


@DRAWS.of("DequantizeLinear")
def dequantize(draw: Draw, operator: str) -> Case:
    shape, axis, size = scaling(draw)
    kind = draw(st.sampled_from(["int8", "uint8"]))
    low, high = RANGES[kind]
    q = random(draw).integers(low, high + 1, shape).astype(kind)
    zeros = random(draw).integers(low, high + 1, size).astype(kind)
    options = {} if axis is None else {"axis": axis}
    given = draw(st.booleans())
    z = spread(zeros.astype(float), shape, axis) if given else 0.0
    return drawn(
        f"DequantizeLinear {options} {q.tolist()}",
        lambda op, q, s: op.DequantizeLinear(
            q, s, op.constant(zeros) if given else None, **options
        ),
        {"q": q, "s": numbers(draw, size, 0.1, 1.0)},
        oracle=lambda q, s: (q.astype(float) - z) * spread(s, shape, axis),
        needs_rank=True,
        dtypes=F32,
    )


@DRAWS.of("DynamicQuantizeLinear")
def dynamic(draw: Draw, operator: str) -> Case:
    return drawn(
        "DynamicQuantizeLinear",
        lambda op, x: op.DequantizeLinear(*op(operator, x, outputs=3)),
        {"x": numbers(draw, draw(shapes(1, 3)))},
        oracle=lambda x: x * 1.0,
        needs_rank=True,
        dtypes=F32,
    )
