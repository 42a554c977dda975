"""Gradient rules of pooling: the maximum, the mean and the p-norm of windows, or of all places."""

from __future__ import annotations

import math
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
    known_sizes,
    put_back,
    reshape_like,
)
from ortflex_plugins.gradients import _planes
from ortflex_plugins.gradients._windows import (
    FLOAT,
    FixedWindows,
    Windows,
    places,
    shares,
    spread,
    windows,
)

RULES = Rules()


def _windows(node: NodeView) -> Windows:
    at = windows(node, node.inputs[0], node.outputs[0], tuple(node.kernel_shape))
    fixed = at.fixed
    if fixed is not None:
        rows = zip(fixed.sizes, fixed.counts, fixed.strides, fixed.pads, strict=True)
        if any((count - 1) * stride >= size + pad[0] for size, count, stride, pad in rows):
            # Shape inference counts such a window up to opset 21; runtimes differ.
            raise NoGradientRule(
                "with ceil_mode and a window that begins after the last row, which counts in some "
                "runtimes only. Write the operator at opset 22, or pads instead of ceil_mode"
            )
    return at


def _tiles(at: Windows, x: Tensor) -> FixedWindows | None:
    """The windows if they cover every place once and Resize can enlarge values of their type."""
    fixed = at.fixed
    return fixed if fixed is not None and fixed.tiles and x.dtype == FLOAT else None


@RULES.rule("MaxPool", since=8, attributes=("ceil_mode", "pads", "storage_order"))
def _max_pool(op: Ops, node: NodeView, g: Tensor, _: Tensor | None = None) -> Sequence[Gradient]:
    """The gradient of a window flows to its first maximum, as in torch. Indices contains its position."""
    x, at = node.inputs[0], _windows(node)
    whole = full(op, g, node.outputs[0])
    tiles = _tiles(at, x)
    if tiles is not None and len(node.outputs) == 1:
        by_planes = _planes.pooled(op, node, whole, tiles)
        return [_first_largest(op, node, whole, tiles) if by_planes is None else by_planes]
    if node.storage_order:
        settings = node.settings("kernel_shape", "ceil_mode", "auto_pad", "pads")
        indices = op("MaxPool", x, outputs=2, **at.settings, **settings)[1]
    else:
        indices = node.more_outputs(2)[1]
    return [put_back(op, whole, indices, x, repeated=at.overlap)]


def _first_largest(op: Ops, node: NodeView, g: Tensor, at: FixedWindows) -> Tensor:
    """The gradient without Indices, whose kernel takes 15 times as long.

    Every element that equals the maximum of its window gets a number; earlier elements get larger
    numbers. The largest number of a window marks the first maximum. All numbers of a window differ, so
    exactly one element is chosen.
    """
    x, y = node.inputs[0], node.outputs[0]
    numbers = np.arange(math.prod(at.kernel), 0, -1, dtype=np.float32).reshape(at.kernel)
    rank = op.constant(np.tile(numbers, at.counts))
    # Products with 0 and 1 take half the time of Where.
    candidates = op.Cast(op.Equal(x, _enlarged(op, y, at)), to=FLOAT) * rank
    first = op.MaxPool(candidates, kernel_shape=list(at.kernel), strides=list(at.strides))
    chosen = op.Equal(candidates, _enlarged(op, first, at))
    return op.Cast(chosen, to=FLOAT) * _enlarged(op, g, at)


def _enlarged(op: Ops, value: Tensor, at: FixedWindows) -> Tensor:
    """Every element repeated over its window; Resize does that faster than Expand."""
    assert value.shape is not None
    scales = op.constant(np.array([1, 1, *at.kernel], np.float32))
    modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
    modes["nearest_mode"] = "floor"
    settings = {name: onnx.helper.make_attribute(name, mode) for name, mode in modes.items()}
    # Shape inference does not keep a batch of unknown size.
    kind = [(value.dtype, (*value.shape[:2], *at.sizes))]
    return value.trace.node("Resize", [value, None, scales], settings, types=kind)[0]


def _over_windows(op: Ops, g: Tensor, at: Windows, x: Tensor) -> Tensor:
    """For each place the sum of the values of its windows."""
    assert at.kernel is not None
    tiles = _tiles(at, x)
    if tiles is not None:
        return _enlarged(op, g, tiles)
    ones = op.constant(np.ones((1, 1, *at.kernel), np.float32), x.dtype)
    # Channels are independent, so each is treated as a sample.
    shape = op.Concat(op.constant([-1, 1]), places(op, g), axis=0)
    return reshape_like(op, spread(op, op.Reshape(g, shape), ones, at, x), x)


@RULES.rule("AveragePool", since=7, attributes=("pads",))
def _average_pool(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Every element of a window gets dY / count. Padding may be counted, but it gets no gradient."""
    x, at = node.inputs[0], _windows(node)
    return [_over_windows(op, full(op, g, node.outputs[0]) * _weight(op, node, at), at, x)]


def _weight(op: Ops, node: NodeView, at: Windows) -> Tensor | float:
    """1 / count of each window."""
    assert at.kernel is not None
    x, y = node.inputs[0], node.outputs[0]
    unpadded = at.pads is not None and at.padding is None
    if not node.ceil_mode and (node.count_include_pad or unpadded):
        return 1 / math.prod(at.kernel)
    inside = shares(op, at, x, y)
    if isinstance(inside, np.ndarray):
        inside = op.constant(inside, x.dtype)
    if not node.count_include_pad:
        return op.Reciprocal(inside)
    # The kernel decides how much padding counts in a window beyond the end: its means of ones are
    # inside / count.
    one = op.Reshape(op.constant(1.0, x.dtype), [1] * (2 + len(at.kernel)))
    shape = op.Concat(op.constant([1, 1]), places(op, x), axis=0)
    settings = node.settings("kernel_shape", "strides", "pads", "auto_pad", "dilations")
    settings |= {"ceil_mode": 1, "count_include_pad": 1}
    return op.AveragePool(op.Expand(one, shape), **settings) / inside


@RULES.rule("LpPool", since=2, attributes=("ceil_mode", "pads"))
def _lp_pool(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """For Y = (Σ|x|ᵖ)^(1/p), dX is x|x|^(p−2) times the sum of dY y^(1−p) over the windows."""
    x, at = node.inputs[0], _windows(node)
    pull = full(op, g, node.outputs[0]) * _power(op, node.outputs[0], 1 - node.p)
    return [_signed_power(op, x, node.p) * _over_windows(op, pull, at, x)]


def _power(op: Ops, y: Tensor, exponent: int) -> Tensor | float:
    """A power of a norm; 1 where the norm is 0, because all factors of the power are 0 there."""
    if exponent == 0:
        return 1.0
    safe = op.Where(op.Equal(y, 0.0), 1.0, y)
    return op.Reciprocal(safe) if exponent == -1 else op.Pow(safe, float(exponent))


def _signed_power(op: Ops, x: Tensor, p: int) -> Tensor:
    """The gradient x·abs(x)^(p−2) of Σ abs(x)ᵖ / p."""
    if p == 1:
        return op.Sign(x)
    if p == 2:
        return x
    return x ** float(p - 1) if p % 2 == 0 else x * op.Abs(x) ** float(p - 2)


@RULES.rule("GlobalAveragePool")
def _global_average(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, y = node.inputs[0], node.outputs[0]
    sizes = known_sizes(x, 2)
    if sizes is not None:
        return [g * (1 / math.prod(sizes))]
    return [g * (op.Cast(op.Size(y), to=g.dtype) / op.Cast(op.Size(x), to=g.dtype))]


@RULES.rule("GlobalMaxPool")
def _global_max(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Equal maxima share the gradient evenly, as in ReduceMax."""
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


@RULES.rule("MaxUnpool", attributes=("kernel_shape", "pads", "strides"))
def _max_unpool(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient is read at the indices, which are positions in the flattened output."""
    x, indices = node.inputs[:2]
    flattened = op.Reshape(full(op, g, node.outputs[0]), [-1])
    return [reshape_like(op, op.Gather(flattened, indices), x), None, None]
