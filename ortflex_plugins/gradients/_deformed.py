"""The gradient rule of DeformConv: a convolution whose kernel reads at given offsets.

The kernel reads columns [N, C · taps, windows], as in any convolution; each element is an interpolated
value of the image, times the mask. The gradient of the weights is the product of the cotangent with
the columns; the gradients of image, offsets and mask share its product with the weights.

Source: Dai et al., "Deformable convolutional networks" (2017); Zhu et al., "Deformable ConvNets v2"
(2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Tensor,
    count_to,
    full,
    known_size,
    known_sizes,
    reshape_like,
    size_of,
)
from ortflex_plugins.gradients._interpolation import Samples, Tap, linear_taps, zeros_outside
from ortflex_plugins.gradients._windows import Sizes


def deform_conv(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The output is W · (mask ∘ x at the shifted window positions). The shape of W must be known."""
    x, weight, offset, _, mask = (*node.inputs, None, None)[:5]
    sizes = known_sizes(weight)
    if sizes is None:
        raise NoGradientRule("with weights of unknown shape")
    groups, taps = node.offset_group, math.prod(sizes[2:])
    channels, rows = sizes[1] * node.group // groups, sizes[0] // node.group
    batch = known_size(x, 0)

    def shaped(value: Tensor, times: int, *other_sizes: int) -> Tensor:
        """``value`` as [N · times, *other_sizes]."""
        if batch is not None or groups == 1:
            return op.Reshape(value, [(batch or 0) * times, *other_sizes])
        first = op.Slice(op.Shape(x), [0], [1]) * times
        return op.Reshape(value, op.Concat(first, op.constant(other_sizes), axis=0))

    # Each group of offsets is a separate image: [N · groups, channels, places].
    places = [size_of(op, x, 2 + axis) for axis in range(len(sizes) - 2)]
    image = shaped(x, groups, channels, -1)
    samples = Samples(image, _taps(op, node, offset, sizes[2:], shaped, places), places)
    weights = None if mask is None else shaped(mask, groups, 1, -1)
    whole = shaped(full(op, g, node.outputs[0]), 1, node.group, rows, -1)
    kernel = op.Reshape(weight, [node.group, rows, sizes[1] * taps])

    def to_columns() -> Tensor:
        """The cotangent of the columns, [N · groups, channels, taps · windows]."""
        columns = op.MatMul(op.Transpose(kernel, perm=[0, 2, 1]), whole)
        return shaped(columns, groups, channels, -1)

    def to_samples() -> Tensor:
        return to_columns() if weights is None else to_columns() * weights

    def to_weight() -> Tensor:
        columns = samples.values(op) if weights is None else samples.values(op) * weights
        windows = shaped(columns, 1, node.group, sizes[1] * taps, -1)
        product = op.MatMul(whole, op.Transpose(windows, perm=[0, 1, 3, 2]))
        return reshape_like(op, op.ReduceSum(product, axes=[0], keepdims=0), weight)

    def to_offset() -> Tensor:
        sides = [shaped(s, groups, taps, 1, -1) for s in samples.to_points(op, to_samples())]
        return reshape_like(op, op.Concat(*sides, axis=2), offset)

    def to_mask() -> Tensor:
        total = op.ReduceSum(to_columns() * samples.values(op), axes=[1], keepdims=0)
        return reshape_like(op, total, mask)

    return [
        lambda: reshape_like(op, samples.to_image(op, to_samples()), x),
        to_weight,
        to_offset,
        lambda: op.Reshape(op.ReduceSum(whole, axes=[0, 3], keepdims=0), [-1]),
        to_mask,
    ][: len(node.inputs)]


def _taps(
    op: Ops,
    node: NodeView,
    offset: Tensor,
    kernel: Sizes,
    shaped: Callable[..., Tensor],
    places: Sequence[Tensor],
) -> list[list[Tap]]:
    """The neighbors, along each axis, of every place that the kernel reads."""
    n = len(kernel)
    strides, dilations = node.strides or [1] * n, node.dilations or [1] * n
    pads = node.pads or [0] * (2 * n)
    offsets = shaped(offset, node.offset_group, math.prod(kernel), n, -1)
    out = []
    for axis, size in enumerate(places):
        count = count_to(op, size_of(op, offset, 2 + axis))
        starts = op.Cast(count * strides[axis] - pads[axis], to=offset.dtype)
        # [taps, 1] and [windows], over all axes.
        steps = np.indices(kernel)[axis].reshape(-1, 1) * dilations[axis]
        others = [k for k in range(n) if k != axis]
        grid = op.Unsqueeze(starts, axes=others) if others else starts
        windows = op.Reshape(op.Expand(grid, op.Slice(op.Shape(offset), [2], [2 + n])), [-1])
        regular = windows + op.constant(steps.astype(np.float32), offset.dtype)
        # [N · groups, taps, windows], with the column of the offsets for this axis.
        moved = regular + op.Gather(offsets, axis, axis=2)
        point = op.Reshape(moved, [0, -1])
        out.append([zeros_outside(op, t, size, offset.dtype) for t in linear_taps(op, point)])
    return out
