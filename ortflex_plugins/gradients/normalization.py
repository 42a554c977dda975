"""Gradient rules of normalizations: batch, layer, group, instance and similar operators.

Most compute y = scale · x̂ + bias with x̂ = (x − μ) r, where r is one over the standard deviation. If h
is the cotangent of x̂ and means are over the normalized axes, dx = r (h − mean h − x̂ mean(h x̂)).

Source: Ioffe and Szegedy, "Batch Normalization" (2015), §3; Ba, Kiros and Hinton, "Layer
Normalization" (2016); Wu and He, "Group Normalization" (2018).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    full,
    passed,
    reshape_like,
)

RULES = Rules()

_END = np.iinfo(np.int64).max


def _rank(x: Tensor) -> int:
    if x.rank is None:
        raise NoGradientRule("with an input of unknown rank")
    return x.rank


def _mean(op: Ops, x: Tensor, axes: Sequence[int]) -> Tensor:
    return op.ReduceMean(x, axes=list(axes), keepdims=1)


def _sum(op: Ops, x: Tensor, axes: Sequence[int]) -> Tensor:
    return op.ReduceSum(x, axes=list(axes), keepdims=0)


def _standardized(op: Ops, x: Tensor, axes: Sequence[int], epsilon: float) -> tuple[Tensor, Tensor]:
    """The tensors x̂ and r of ``x``, over some of its axes."""
    centered = x - _mean(op, x, axes)
    inverse = op.Reciprocal(op.Sqrt(_mean(op, centered * centered, axes) + epsilon))
    return centered * inverse, inverse


def _to_input(op: Ops, h: Tensor, x_hat: Tensor, r: Tensor, axes: Sequence[int]) -> Tensor:
    """Return r (h − mean h − x̂ mean(h x̂))."""
    return r * (h - _mean(op, h, axes) - x_hat * _mean(op, h * x_hat, axes))


def _channels(op: Ops, values: Tensor, rank: int) -> Tensor:
    """Values [C] in a shape that broadcasts with [N, C, …]."""
    return op.Unsqueeze(values, axes=list(range(1, rank - 1))) if rank > 2 else values


@RULES.rule("BatchNormalization", attributes=("momentum", "training_mode"))
def _batch(
    op: Ops, node: NodeView, g: Tensor | None, *statistics: Tensor | None
) -> Sequence[Gradient]:
    """Training mode is supported from opset 14 on."""
    axes = [0, *range(2, _rank(node.inputs[0]))]
    if len(node.outputs) > 3 or (op.opset < 14 and len(node.outputs) > 1):
        raise NoGradientRule("with saved statistics among its outputs")
    if g is None or any(s is not None for s in statistics):
        return node.through(_batch_outputs(op, node, axes), g, *statistics)
    rule = _batch_training if node.training_mode else _batch_inference
    return rule(op, node, full(op, g, node.inputs[0]), axes)


def _batch_training(
    op: Ops, node: NodeView, whole: Tensor, axes: Sequence[int]
) -> Sequence[Gradient]:
    """Training mode: Y depends on the statistics of the batch, not on the running statistics."""
    x, scale = node.inputs[:2]
    wide = op.Cast(whole, to=scale.dtype)
    x_hat, r = _standardized(op, op.Cast(x, to=scale.dtype), axes, node.epsilon)
    factor = r * _channels(op, scale, _rank(x))
    return [
        lambda: op.Cast(_to_input(op, wide, x_hat, factor, axes), to=x.dtype),
        lambda: _sum(op, wide * x_hat, axes),
        lambda: _sum(op, wide, axes),
        None,
        None,
    ]


def _batch_inference(
    op: Ops, node: NodeView, whole: Tensor, axes: Sequence[int]
) -> Sequence[Gradient]:
    """Inference mode: mean and variance are ordinary inputs."""
    x, scale, bias, mean, variance = node.inputs
    r = op.Reciprocal(op.Sqrt(variance + node.epsilon))
    factor = op.Cast(scale, to=r.dtype) * r

    def summed() -> Tensor:
        return op.Cast(_sum(op, whole, axes), to=r.dtype)

    def slope() -> Tensor:
        centered = op.Cast(x, to=r.dtype) - _channels(op, mean, _rank(x))
        return _sum(op, op.Cast(whole, to=r.dtype) * centered, axes)

    return [
        lambda: whole * op.Cast(_channels(op, factor, _rank(x)), to=x.dtype),
        lambda: op.Cast(slope() * r, to=scale.dtype),
        lambda: op.Cast(summed(), to=bias.dtype),
        lambda: -summed() * factor,
        lambda: -0.5 * (slope() * factor) * (r * r),
    ]


def _batch_outputs(op: Ops, node: NodeView, axes: Sequence[int]) -> list[Tensor]:
    """Y and the running statistics in training mode, computed by simpler operators."""
    x, scale, bias, mean, variance = node.inputs
    rank = _rank(x)
    wide = op.Cast(x, to=mean.dtype)
    x_hat, _ = _standardized(op, wide, axes, node.epsilon)
    y = op.Cast(x_hat, to=scale.dtype) * _channels(op, scale, rank) + _channels(op, bias, rank)
    centered = wide - _mean(op, wide, axes)
    batch = (
        op.ReduceMean(wide, axes=list(axes), keepdims=0),
        op.ReduceMean(centered * centered, axes=list(axes), keepdims=0),
    )
    keep = node.momentum
    running = [
        keep * old + (1 - keep) * new for old, new in zip((mean, variance), batch, strict=True)
    ]
    return [op.Cast(y, to=x.dtype), *running]


@RULES.rule("LayerNormalization", attributes=("epsilon",))
def _layer(op: Ops, node: NodeView, g: Tensor | None, *stash: Tensor | None) -> Sequence[Gradient]:
    x, scale = node.inputs[:2]
    axes = _trailing(node, x)
    if g is None or any(s is not None for s in stash):
        return node.through(_layer_outputs(op, node, axes), g, *stash)
    whole = full(op, g, node.inputs[0])
    floats = x.dtype == node.stash_type == onnx.TensorProto.FLOAT
    if floats and node.input(2) is not None:
        # The operator computes these values anyway. Without a bias, an optimizer of onnxruntime 1.16
        # crashes the process if these outputs are used.
        _, mean, r = node.more_outputs(3)
        x_hat = (x - mean) * r
    else:
        x_hat, r = _standardized(op, x, axes, node.epsilon)
    return [
        lambda: _to_input(op, whole * scale, x_hat, r, axes),
        lambda: whole * x_hat,
        lambda: passed(op, g, node.outputs[0], node.inputs[2]),
    ]


def _layer_outputs(op: Ops, node: NodeView, axes: Sequence[int]) -> list[Tensor]:
    """Y, the mean and one over the standard deviation, computed by simpler operators."""
    x, scale, bias = (*node.inputs, None)[:3]
    wide = op.Cast(x, to=node.stash_type)
    x_hat, r = _standardized(op, wide, axes, node.epsilon)
    y = op.Cast(x_hat, to=x.dtype) * scale
    return [y if bias is None else y + bias, _mean(op, wide, axes), r]


def _trailing(node: NodeView, x: Tensor) -> list[int]:
    """The axes from the attribute ``axis`` on."""
    rank = _rank(x)
    return list(range(node.axis % rank, rank))


@RULES.rule("RMSNormalization", attributes=("stash_type",))
def _rms(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """For y = scale · x̂ with x̂ = x r, 1/r² = mean x² + ε and h = g · scale, dx = r (h − x̂ mean(h x̂))."""
    x, scale = node.inputs
    axes = _trailing(node, x)
    whole = full(op, g, node.inputs[0])
    r: Tensor = op.Reciprocal(op.Sqrt(_mean(op, x * x, axes) + node.epsilon))
    x_hat: Tensor = x * r

    def to_x() -> Tensor:
        h: Tensor = whole * scale
        return r * (h - x_hat * _mean(op, h * x_hat, axes))

    return [to_x, lambda: whole * x_hat]


@RULES.rule("InstanceNormalization")
def _instance(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, scale = node.inputs[:2]
    rank = _rank(x)
    whole = full(op, g, node.inputs[0])
    axes = list(range(2, rank))
    x_hat, r = _standardized(op, x, axes, node.epsilon)
    return [
        lambda: _to_input(op, whole, x_hat, r * _channels(op, scale, rank), axes),
        lambda: _sum(op, whole * x_hat, [0, *axes]),
        lambda: _sum(op, whole, [0, *axes]),
    ]


@RULES.rule("GroupNormalization", since=21, attributes=("stash_type",))
def _group(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Supported from opset 21 on. The earlier form, with one scale per group, is deprecated."""
    x, scale = node.inputs[:2]
    rank = _rank(x)
    whole = full(op, g, x)
    axes = [0, *range(2, rank)]

    def grouped(t: Tensor) -> Tensor:
        return op.Reshape(t, [0, node.num_groups, -1])

    x_hat, r = _standardized(op, grouped(x), [2], node.epsilon)

    def to_x() -> Tensor:
        h = grouped(whole * _channels(op, scale, rank))
        return reshape_like(op, _to_input(op, h, x_hat, r, [2]), x)

    return [
        to_x,
        lambda: _sum(op, whole * reshape_like(op, x_hat, x), axes),
        lambda: _sum(op, whole, axes),
    ]


@RULES.rule("MeanVarianceNormalization")
def _mean_variance(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    whole = full(op, g, node.inputs[0])
    axes = [0, 2, 3] if node.axes is None else node.axes
    # The standard adds 1e-9 to the standard deviation, less than the resolution of float32.
    x_hat, r = _standardized(op, node.inputs[0], axes, 0.0)
    return [_to_input(op, whole, x_hat, r, axes)]


@RULES.rule("LpNormalization")
def _lp(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """For y = x / ‖x‖, dx = (g − n Σ g y) / ‖x‖, where n is sign x for p = 1 and y for p = 2.

    A vector of zeros stays zero and has the gradient 0.
    """
    x, y, axis = node.inputs[0], node.outputs[0], [node.axis]
    if node.p == 1:
        # Not ReduceL1, which older runtimes do not compute in float64.
        norm, normal = op.ReduceSum(op.Abs(x), axes=axis, keepdims=1), op.Sign(x)
    else:
        norm, normal = op.ReduceL2(x, axes=axis, keepdims=1), y
    along = op.ReduceSum(g * y, axes=axis, keepdims=1)
    return [op.Where(op.Equal(norm, 0.0), 0.0, (g - normal * along) / norm)]


@RULES.rule("LRN")
def _lrn(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The function is y = x s^−β with s = k + α/n Σ x² over n neighboring channels.

    dx = g s^−β − 2αβ/n · x Σ g y / s, where the last sum is over the channels whose neighbor x is.
    """
    x, y = node.inputs[0], node.outputs[0]
    rank, size = _rank(x), node.size
    before, after = (size - 1) // 2, size // 2
    share = node.alpha / size
    s = node.bias + share * _window(op, x * x, rank, before, after)
    back = _window(op, (g * y) / s, rank, after, before)
    return [g * op.Pow(s, -node.beta) - (2 * node.beta * share) * (x * back)]


def _window(op: Ops, x: Tensor, rank: int, before: int, after: int) -> Tensor:
    """For each channel the sum over its neighbors."""
    last = before + after
    if last == 0:
        return x
    spatial = [0] * (rank - 2)
    padded = op.Pad(x, [0, before, *spatial, 0, after, *spatial])
    ends = [*range(-last, 0), _END]
    return op.Sum(*(op.Slice(padded, [k], [end], [1]) for k, end in enumerate(ends)))
