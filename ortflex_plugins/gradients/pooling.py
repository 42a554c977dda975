"""Gradient rules of pooling: maximum, mean and p-norm of windows, or of all places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from ortflex_core.autodiff import Gradient, NodeView, Rules, full, put_back, reshape_like
from ortflex_core.errors import NoGradientRule
from ortflex_core.graph import Ops, Tensor
from ortflex_plugins.gradients import _planes
from ortflex_plugins.gradients._windows import (
    FLOAT,
    Windows,
    flat,
    known,
    places,
    shares,
    spread,
    windows,
)

RULES = Rules()


def _windows(node: NodeView) -> Windows:
    at = windows(node, node.inputs[0], node.outputs[0], tuple(node.kernel_shape))
    if at.sizes is not None and at.counts is not None and at.pads is not None:
        for size, count, stride, (before, _) in zip(
            at.sizes, at.counts, at.strides, at.pads, strict=True
        ):
            if (count - 1) * stride >= size + before:
                # Shape inference counts such a window up to opset 21; runtimes differ.
                raise NoGradientRule(
                    "with ceil_mode and a window that begins after the last row, which counts in some "
                    "runtimes only. Write the operator at opset 22, or pads instead of ceil_mode"
                )
    return at


@RULES.rule("MaxPool", since=8)
def _max_pool(op: Ops, node: NodeView, g: Tensor, _: Tensor | None = None) -> Sequence[Gradient]:
    """A window's gradient goes to its first maximum, as in Indices and in torch."""
    x, at = node.inputs[0], _windows(node)
    whole = full(op, g, node.outputs[0])
    if at.tiles and x.dtype == FLOAT and len(node.outputs) == 1:
        by_planes = _planes.pooled(op, node, whole, at)
        return [_first_largest(op, node, whole, at) if by_planes is None else by_planes]
    if node.storage_order:
        settings = {**at.settings, "kernel_shape": node.kernel_shape, "ceil_mode": node.ceil_mode}
        settings |= {"auto_pad": node.auto_pad, "pads": node.pads}
        indices = op("MaxPool", x, outputs=2, **settings)[1]
    else:
        indices = node.more_outputs(2)[1]
    return [put_back(op, whole, indices, x, repeated=at.overlap)]


def _first_largest(op: Ops, node: NodeView, g: Tensor, at: Windows) -> Tensor:
    """Without Indices, whose kernel takes 15 times as long: windows that tile can be upsampled.

    Every maximum gets a number, the higher the earlier it occurs; the highest number of a window
    marks the first maximum. The numbers of equal elements differ, so that exactly one is chosen.
    """
    assert at.kernel is not None
    assert at.counts is not None
    x, y = node.inputs[0], node.outputs[0]
    numbers = np.arange(flat(at.kernel), 0, -1, dtype=np.float32).reshape(at.kernel)
    rank = op.constant(np.tile(numbers, at.counts))
    # Products with 0 and 1 take half as long as Where.
    candidates = op.Cast(op.Equal(x, _enlarged(op, y, at)), to=FLOAT) * rank
    first = op.MaxPool(candidates, kernel_shape=list(at.kernel), strides=list(at.strides))
    chosen = op.Equal(candidates, _enlarged(op, first, at))
    return op.Cast(chosen, to=FLOAT) * _enlarged(op, g, at)


def _enlarged(op: Ops, value: Tensor, at: Windows) -> Tensor:
    """Every element repeated over its window, which is what Resize does faster than Expand."""
    assert at.kernel is not None
    assert at.sizes is not None
    assert value.shape is not None
    scales = op.constant(np.array([1, 1, *at.kernel], np.float32))
    how = {
        "mode": "nearest",
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    settings = {name: onnx.helper.make_attribute(name, v) for name, v in how.items()}
    # Shape inference does not keep a batch of unknown size.
    kind = [(value.dtype, (*value.shape[:2], *at.sizes))]
    return value.trace.node("Resize", [value, None, scales], settings, types=kind)[0]


def _over_windows(op: Ops, g: Tensor, at: Windows, x: Tensor) -> Tensor:
    """Each window's number added to all its places."""
    assert at.kernel is not None
    if at.tiles and x.dtype == FLOAT:
        return _enlarged(op, g, at)
    ones = op.constant(np.ones((1, 1, *at.kernel), np.float32), x.dtype)
    # Channels are independent: each is treated as a sample.
    if at.counts is not None:
        alone = op.Reshape(g, op.constant([-1, 1, *at.counts]))
    else:
        alone = op.Reshape(g, op.Concat(op.constant([-1, 1]), places(op, g), axis=0))
    return reshape_like(op, spread(op, alone, ones, at, x), x)


@RULES.rule("AveragePool", since=7)
def _average_pool(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Every place of a window gets dY / count; padding may count, but has no gradient."""
    x, at = node.inputs[0], _windows(node)
    return [_over_windows(op, full(op, g, node.outputs[0]) * _weight(op, node, at), at, x)]


def _weight(op: Ops, node: NodeView, at: Windows) -> Tensor | float:
    """1 / count of each window."""
    assert at.kernel is not None
    x, y = node.inputs[0], node.outputs[0]
    unpadded = at.pads is not None and not any(map(any, at.pads))
    if not node.ceil_mode and (node.count_include_pad or unpadded):
        return 1 / flat(at.kernel)
    inside = shares(op, at, x, y)
    if isinstance(inside, np.ndarray):
        inside = op.constant(inside, x.dtype)
    if not node.count_include_pad:
        return op.Reciprocal(inside)
    # The kernel decides how much padding a window beyond the end counts: its means of ones are
    # inside / count.
    one = op.Reshape(op.constant(1.0, x.dtype), op.constant([1] * (2 + len(at.kernel))))
    shape = op.Concat(op.constant([1, 1]), places(op, x), axis=0)
    settings = {"kernel_shape": node.kernel_shape, "strides": node.strides, "pads": node.pads}
    settings |= {"auto_pad": node.auto_pad, "ceil_mode": 1, "count_include_pad": 1}
    settings["dilations"] = node.dilations
    return op.AveragePool(op.Expand(one, shape), **settings) / inside


@RULES.rule("LpPool", since=2)
def _lp_pool(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Y = (Σ|x|ᵖ)^(1/p): dX = x|x|^(p−2) times the sum over windows of dY y^(1−p)."""
    x, at = node.inputs[0], _windows(node)
    pull = full(op, g, node.outputs[0]) * _power(op, node.outputs[0], 1 - node.p)
    return [_signed_power(op, x, node.p) * _over_windows(op, pull, at, x)]


def _power(op: Ops, y: Tensor, exponent: int) -> Tensor | float:
    """A power of a norm, 1 where the norm is 0: everything it is multiplied with is 0 there."""
    if exponent == 0:
        return 1.0
    safe = op.Where(op.Equal(y, 0.0), 1.0, y)
    return op.Reciprocal(safe) if exponent == -1 else op.Pow(safe, float(exponent))


def _signed_power(op: Ops, x: Tensor, p: int) -> Tensor:
    if p == 1:
        return op.Sign(x)
    if p == 2:
        return x
    return x ** float(p - 1) if p % 2 == 0 else x * op.Abs(x) ** float(p - 2)


@RULES.rule("GlobalAveragePool")
def _global_average(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, y = node.inputs[0], node.outputs[0]
    sizes = None if x.shape is None else known(x.shape[2:])
    if sizes is not None:
        return [g * (1 / flat(sizes))]
    return [g * (op.Cast(op.Size(y), to=g.dtype) / op.Cast(op.Size(x), to=g.dtype))]


@RULES.rule("GlobalMaxPool")
def _global_max(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Ties are shared evenly, as by ReduceMax."""
    x, y = node.inputs[0], node.outputs[0]
    if x.rank is None:
        raise NoGradientRule("on a tensor of unknown rank")
    mask = op.Cast(op.Equal(x, y), to=x.dtype)
    ties = op.ReduceSum(mask, axes=list(range(2, x.rank)), keepdims=1)
    return [g / ties * mask]


@RULES.rule("GlobalLpPool")
def _global_lp(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, y = node.inputs[0], node.outputs[0]
    return [g * _power(op, y, 1 - node.p) * _signed_power(op, x, node.p)]


@RULES.rule("MaxUnpool")
def _max_unpool(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Every element was written to its place in the flattened output; its gradient is read from there."""
    x, indices = node.inputs[:2]
    line = op.Reshape(full(op, g, node.outputs[0]), op.constant([-1]))
    return [reshape_like(op, op.Gather(line, indices), x), None, None]
