"""Gradient rules of convolutions: any groups, strides, dilations and padding, one to three axes.

The gradient of a kernel has three forms:

- one convolution (:mod:`ortflex_plugins.gradients._correlation`); used for all but few channels
- one product with all places of the kernel side by side; used for few channels and for kernels 1×1
- a product for each row of the kernel (:mod:`ortflex_plugins.gradients._row_products`), or for each of its
  places; used for depthwise convolutions

On planes of few places, the whole convolution is a product
(:mod:`ortflex_plugins.gradients._small_planes`) or computes all samples at once
(:mod:`ortflex_plugins.gradients._whole_batch`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    dims,
    full,
    known_size,
    known_sizes,
    reshape_like,
)
from ortflex_plugins.gradients import _planes, _whole_batch
from ortflex_plugins.gradients._correlation import correlation
from ortflex_plugins.gradients._row_products import by_rows
from ortflex_plugins.gradients._small_planes import small_planes
from ortflex_plugins.gradients._windows import (
    END,
    FixedWindows,
    Sizes,
    Windows,
    halves,
    padded,
    slices,
    spread,
    windows,
)

RULES = Rules()

_FEW_CHANNELS = 8
"""With fewer input channels of a group, one convolution is slower: onnxruntime copies them in runs."""
_MANY_OUTPUTS, _FEW_CHANNELS_OF_MANY = 32, 3
"""From this number of output channels on, copies are a smaller part, and the limit is the second one."""
_TINY = 1 << 14
"""With fewer elements side by side, starting more nodes takes longer than arithmetic."""


def _kernel(node: NodeView, weight: Tensor) -> Sizes | None:
    if node.kernel_shape:
        return tuple(node.kernel_shape)
    return known_sizes(weight, 2)


def _bias(op: Ops, node: NodeView, g: Tensor, n: int) -> Tensor:
    return op.ReduceSum(g, axes=[0, *range(2, 2 + n)], keepdims=0)


@RULES.rule("Conv", attributes=("group", "pads"))
def _conv(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient dX is the transposed convolution of dY with W, and dW is X correlated with dY."""
    x, weight = node.inputs[:2]
    y = node.outputs[0]
    at = windows(node, x, y, _kernel(node, weight))
    whole = full(op, g, y)

    def to_x() -> Tensor:
        if at.plain and node.group == 1:
            order = [1, 0, *at.axes]
            return op.Conv(whole, op.Transpose(weight, perm=order))
        if batched and (found := _whole_batch.to_x(op, whole, x, weight, at)) is not None:
            return found
        return spread(op, whole, weight, at, x, node.group)

    batched = _whole_batch.pays(node, at)
    shortcuts = node.trace.shortcuts
    planes = None if shortcuts is None else shortcuts.parts.get(whole)
    small = None if planes is not None else small_planes(op, node, at)
    if small is not None:
        if shortcuts is not None:
            shortcuts.instead[y] = small.forward()
        return [*small.gradients(whole), lambda: _bias(op, node, whole, len(at.strides))]
    if planes is not None:
        return [
            to_x,
            lambda: _planes.kernel_gradient(op, planes, weight),
            lambda: _planes.bias_gradient(op, planes),
        ]
    if batched and shortcuts is not None:
        shortcuts.instead[y] = _whole_batch.forward(op, node, at)
    return [
        to_x,
        lambda: kernel_gradient(op, x, whole, weight, at, node.group),
        lambda: _bias(op, node, whole, len(at.strides)),
    ]


@RULES.rule("ConvTranspose", attributes=("group", "output_padding"))
def _conv_transpose(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient dX is the convolution of dY with W, and dW is dY correlated with X."""
    x, weight = node.inputs[:2]
    y = node.outputs[0]
    at = _transposed_windows(node, y, x, _kernel(node, weight))
    whole = full(op, g, y)

    def to_x() -> Tensor:
        back = op.Conv(whole, weight, **at.settings, group=node.group, pads=at.padding)
        output_padding = node.output_padding or ()
        if any(p >= s for p, s in zip(output_padding, at.strides, strict=False)):
            # There may be more windows in the padding than places in X.
            axes = list(at.axes)
            back = op.Slice(back, [0] * len(axes), op.Slice(dims(op, x), [2], [END]), axes)
        return back

    return [
        to_x,
        lambda: kernel_gradient(op, whole, x, weight, at, node.group),
        lambda: _bias(op, node, whole, len(at.strides)),
    ]


def _transposed_windows(node: NodeView, y: Tensor, x: Tensor, kernel: Sizes | None) -> Windows:
    """The windows over Y, one for each place of X; ``output_shape`` and SAME decide the padding."""
    at = windows(node, y, x, kernel) if node.auto_pad in (None, "NOTSET", "VALID") else None
    if at is not None and node.output_shape is None:
        return at
    counts = known_sizes(x, 2)
    if kernel is None or counts is None:
        raise NoGradientRule(
            f"with {'output_shape' if node.output_shape else f'auto_pad={node.auto_pad}'} on sizes "
            "that are not known while the graph is built"
        )
    n = len(kernel)
    strides = tuple(node.strides or [1] * n)
    sizes = (node.output_shape or [o * s for o, s in zip(counts, strides, strict=True)])[-n:]
    fixed = FixedWindows(
        kernel=kernel,
        strides=strides,
        dilations=tuple(node.dilations or [1] * n),
        pads=(),
        sizes=tuple(int(size) for size in sizes),
        counts=counts,
    )
    output_padding = node.output_padding or [0] * n
    rows = zip(counts, strides, fixed.spans, output_padding, sizes, strict=True)
    totals = [max(s * (o - 1) + extra + span - size, 0) for o, s, span, extra, size in rows]
    # SAME_UPPER puts the larger half last; otherwise, also without auto_pad, it is first.
    return attrs.evolve(fixed, pads=tuple(halves(t, node.auto_pad != "SAME_UPPER") for t in totals))


def kernel_gradient(
    op: Ops, x: Tensor, g: Tensor, weight: Tensor, at: Windows, group: int
) -> Tensor:
    """dW[m, c, κ] = Σ over n and windows o of g[n, m, o] · x[n, c, o·stride + κ·dilation − begin].

    The channels c and m belong to one group.
    """
    sizes = known_sizes(weight)
    if sizes is None or at.kernel is None:
        return correlation(op, x, g, weight, at, group)
    channels, taps = sizes[1], math.prod(at.kernel)
    depthwise = channels == 1 and sizes[0] == group > 1
    if depthwise and (rows := by_rows(op, x, g, weight, at, group)) is not None:
        return rows
    elements, samples = None, known_size(g, 0)
    if at.counts is not None and samples is not None:
        elements = channels * group * taps * samples * math.prod(at.counts)
    tiny = elements is not None and elements < _TINY
    few = _FEW_CHANNELS if sizes[0] // group < _MANY_OUTPUTS else _FEW_CHANNELS_OF_MANY
    if taps > 1 and (tiny or channels >= few):
        return correlation(op, x, g, weight, at, group)
    n = len(at.kernel)
    # With the samples innermost, slices copy longer runs, of several samples at least.
    left = op.Transpose(g, perm=[1, *at.axes, 0])
    moved = op.Transpose(padded(op, x, g, at), perm=[1, *at.axes, 0])
    bare = attrs.evolve(at, pads=((0, 0),) * n)
    parts = list(slices(op, moved, bare, range(1, 1 + n)))
    if channels == 1 and group > 1:
        # One copy of each place is enough, and a product is a sum.
        sums = [_product(op, left, part, sizes[0], 1, group) for part in parts]
        return reshape_like(op, op.Concat(*sums, axis=-1) if taps > 1 else sums[0], weight)
    if taps > 1:
        parts = [op.Concat(*(op.Reshape(p, [channels * group, 1, -1]) for p in parts), axis=1)]
    product = _product(op, left, parts[0], sizes[0], channels * taps, group)
    return reshape_like(op, product, weight)


def _product(op: Ops, left: Tensor, right: Tensor, rows: int, columns: int, group: int) -> Tensor:
    """[(group,) rows of a group, columns]: left · right summed over all samples and windows."""
    if group == 1:
        return op.Gemm(op.Reshape(left, [rows, -1]), op.Reshape(right, [columns, -1]), transB=1)
    a = op.Reshape(left, [group, rows // group, -1])
    b = op.Reshape(right, [group, columns, -1])
    return op.MatMul(a, op.Transpose(b, perm=[0, 2, 1]))
