"""Draws of the operators that normalize, of the standard's losses, and of quantization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np

from ortflex_core import Array
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import (
    F32,
    Draw,
    Draws,
    axes_of,
    axis_of,
    drawn,
    numbers,
    random,
    shapes,
    tenths,
    torch,
)

DRAWS = Draws()
EPSILON = st.sampled_from([1e-5, 1e-3, 0.1])


def standardized(x: Array, axes: Sequence[int], epsilon: float = 1e-5) -> Array:
    axis = tuple(axes)
    centered = x - x.mean(axis, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis, keepdims=True) + epsilon)


def channels(values: Array, x: Array) -> Array:
    return values.reshape(-1, *[1] * (x.ndim - 2))


def lrn(x: Array, size: int, alpha: float, beta: float, bias: float) -> Array:
    s = np.full_like(x, bias)
    for c in range(x.shape[1]):
        low, high = max(0, c - (size - 1) // 2), c + size - 1 - (size - 1) // 2
        s[:, c] += alpha / size * (x[:, low : high + 1] ** 2).sum(axis=1)
    return x / s**beta


def _f() -> Any:
    return torch.nn.functional


def per_channel(draw: Draw, count: int) -> dict[str, Array]:
    return {"s": numbers(draw, (count,), 0.5, 2.0, salt=1), "b": numbers(draw, (count,), salt=2)}


@DRAWS.of("BatchNormalization")
def batch(draw: Draw, operator: str) -> Case:
    """Of statistics that are given, of the batch's own, and the running ones as outputs."""
    kind = draw(st.sampled_from(["inference", "training", "both"]))
    shape = (draw(st.integers(2, 3)), draw(st.integers(1, 3)), *draw(shapes(0, 2, side=3)))
    count = shape[1]
    epsilon, keep = draw(EPSILON), draw(tenths(0, 10))
    arrays = {"x": numbers(draw, shape), **per_channel(draw, count)}
    arrays["m"] = numbers(draw, (count,), salt=3)
    arrays["v"] = numbers(draw, (count,), 0.5, 2.0, salt=4)
    axes = (0, *range(2, len(shape)))

    def formula(op: Any, **xs: Any) -> Any:
        if kind == "inference":
            return op.BatchNormalization(*xs.values(), epsilon=epsilon)
        y, mean, variance = op.BatchNormalization(
            *xs.values(), epsilon=epsilon, training_mode=1, momentum=keep, outputs=3
        )
        if kind == "training":
            return y
        # Not without Y: onnxruntime 1.16 then puts other values where the statistics are.
        running = op.ReduceSum(mean * (variance + 2.0), keepdims=0)
        return op.ReduceSum(y * y * y, keepdims=0) * running

    def oracle(x: Array, s: Array, b: Array, m: Array, v: Array) -> Array:
        if kind == "inference":
            x_hat = (x - channels(m, x)) / np.sqrt(channels(v, x) + epsilon)
            return x_hat * channels(s, x) + channels(b, x)  # type: ignore[no-any-return]
        y = standardized(x, axes, epsilon) * channels(s, x) + channels(b, x)
        new_m, new_v = keep * m + (1 - keep) * x.mean(axes), keep * v + (1 - keep) * x.var(axes)
        running = (new_m * (new_v + 2)).sum()
        return y if kind == "training" else (y**3).sum() * running  # type: ignore[no-any-return]

    def in_torch(x: Any, s: Any, b: Any, m: Any, v: Any) -> Any:
        if kind == "inference":  # its own passes nothing to the statistics
            return channels(s / (v + epsilon).sqrt(), x) * (x - channels(m, x)) + channels(b, x)
        return _f().batch_norm(x, None, None, s, b, True, 0.1, epsilon)

    if kind == "training":  # no one sees the running statistics
        held = [arrays[n].astype(np.float32) for n in "mv"]
        return drawn(
            f"BatchNormalization training {epsilon}",
            lambda op, x, s, b: formula(
                op, x=x, s=s, b=b, m=op.constant(held[0], x.dtype), v=op.constant(held[1], x.dtype)
            ),
            {n: arrays[n] for n in "xsb"},
            oracle=lambda x, s, b: oracle(x, s, b, *held),
            torch=lambda x, s, b: in_torch(x, s, b, None, None),
            since=15,
            needs_rank=True,
        )
    fields = {"torch": in_torch} if kind == "inference" else {"since": 15}
    return drawn(
        f"BatchNormalization {kind} {epsilon} {keep}",
        formula,
        arrays,
        oracle=oracle,
        needs_rank=True,
        **fields,
    )


@DRAWS.of("LayerNormalization", "RMSNormalization")
def layer(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 4))
    axis = draw(st.none() | st.just(axis_of(draw, len(shape))))
    epsilon = draw(EPSILON)
    options = {"epsilon": epsilon} | ({} if axis is None else {"axis": axis})
    first = (-1 if axis is None else axis) % len(shape)
    axes = tuple(range(first, len(shape)))
    centered = operator == "LayerNormalization"
    arrays = {"x": numbers(draw, shape), "s": numbers(draw, shape[first:], 0.5, 2.0, salt=1)}
    if centered and draw(st.booleans()):
        arrays["b"] = numbers(draw, shape[first:], salt=2)

    # Whether the mean and one over the deviation are used, too; without a bias that takes the
    # process of onnxruntime 1.16 down.
    told = "b" in arrays and draw(st.booleans())

    def formula(op: Any, **xs: Any) -> Any:
        if not told:
            return op(operator, *xs.values(), **options)
        y, mean, inverse = op(operator, *xs.values(), outputs=3, **options)
        return y * inverse + mean

    def oracle(x: Array, s: Array, b: Any = 0.0) -> Array:
        if centered:
            y = standardized(x, axes, epsilon) * s + b
            inverse = 1 / np.sqrt(x.var(axes, keepdims=True) + epsilon)
            return y * inverse + x.mean(axes, keepdims=True) if told else y  # type: ignore[no-any-return]
        return x / np.sqrt((x**2).mean(axes, keepdims=True) + epsilon) * s  # type: ignore[no-any-return]

    def in_torch(x: Any, s: Any, b: Any = None) -> Any:
        if centered:
            y = _f().layer_norm(x, shape[first:], s, b, epsilon)
            inverse = (x.var(axes, correction=0, keepdim=True) + epsilon) ** -0.5
            return y * inverse + x.mean(axes, keepdim=True) if told else y
        return _f().rms_norm(x, shape[first:], s, epsilon)

    return drawn(
        f"{operator} {options} told={told}",
        formula,
        arrays,
        oracle=oracle,
        torch=in_torch,
        since=17 if centered else 23,
        needs_rank=True,
        # The statistics are of stash_type, float32.
        dtypes=F32 if told else (np.float64, np.float32),
    )


@DRAWS.of("InstanceNormalization", "GroupNormalization")
def instance(draw: Draw, operator: str) -> Case:
    groups = draw(st.integers(1, 3))
    grouped = operator == "GroupNormalization"
    count = groups * draw(st.integers(1, 2)) if grouped else draw(st.integers(1, 3))
    behind = draw(shapes(1, 2)) if not grouped or draw(st.booleans()) else (2,)
    shape = (draw(st.integers(1, 2)), count, *behind)
    epsilon = draw(EPSILON)
    options = {"epsilon": epsilon} | ({"num_groups": groups} if grouped else {})

    def oracle(x: Array, s: Array, b: Array) -> Array:
        lines = x.reshape(len(x), groups if grouped else count, -1)
        x_hat = standardized(lines, [2], epsilon).reshape(x.shape)
        return x_hat * channels(s, x) + channels(b, x)  # type: ignore[no-any-return]

    def in_torch(x: Any, s: Any, b: Any) -> Any:
        if x[0].numel() == (groups if grouped else count):  # one value each, which it refuses
            return 0 * x * channels(s, x) + channels(b, x)
        return _f().group_norm(x, groups if grouped else count, s, b, epsilon)

    return drawn(
        f"{operator} {options}",
        lambda op, **xs: op(operator, *xs.values(), **options),
        {"x": numbers(draw, shape), **per_channel(draw, count)},
        oracle=oracle,
        torch=in_torch,
        since=21 if grouped else 13,
        needs_rank=True,
    )


@DRAWS.of("MeanVarianceNormalization")
def mean_variance(draw: Draw, operator: str) -> Case:
    axes: Sequence[int] | None = draw(st.none() | st.just(axes_of(draw, 4, smallest=1)))
    shape = (2, *(draw(st.integers(2, 3)) for _ in range(3)))
    # Of a single element nothing is left, and of few nothing but rounding.
    options = {} if axes is None else {"axes": axes}
    at = [a % 4 for a in (axes if axes is not None else [0, 2, 3])]
    return drawn(
        f"MeanVarianceNormalization {options}",
        lambda op, x: op.MeanVarianceNormalization(x, **options),
        {"x": numbers(draw, shape)},
        oracle=lambda x: standardized(x, at, 0.0),
    )


@DRAWS.of("LpNormalization")
def lp(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3))
    options = {"p": draw(st.integers(1, 2)), "axis": axis_of(draw, len(shape))}
    return drawn(
        f"LpNormalization {options}",
        lambda op, x: op.LpNormalization(x, **options),
        {"x": numbers(draw, shape)},
        oracle=lambda x: x / np.linalg.norm(x, options["p"], options["axis"], keepdims=True),
        torch=lambda x: _f().normalize(x, options["p"], options["axis"]),
    )


@DRAWS.of("LRN")
def local_response(draw: Draw, operator: str) -> Case:
    size = draw(st.sampled_from([1, 3, 5]))  # onnxruntime takes odd ones only
    options: dict[str, Any] = {
        "size": size,
        "alpha": draw(tenths(1, 9)),
        "beta": draw(tenths(2, 12)),
        "bias": draw(tenths(5, 20)),
    }
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 5)), *draw(shapes(2, 2, side=2)))
    return drawn(
        f"LRN {options}",
        lambda op, x: op.LRN(x, **options),
        {"x": numbers(draw, shape)},
        oracle=lambda x: lrn(x, **options),
        torch=lambda x: _f().local_response_norm(
            x, size, options["alpha"], options["beta"], options["bias"]
        ),
        needs_rank=True,
        dtypes=F32,
    )


# Losses and quantization -------------------------------------------------------------------------


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
