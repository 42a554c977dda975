"""A convolution and the MaxPool that tiles its output, plane by plane.

With the samples innermost, X is [C, H, W, N]. The values that element κ of a kernel reads at place π
of every window of the pool are one slice of X, which starts at π + κ; places with the same sum share
the slice. The slices of all κ, side by side, are the columns of π, and W · columns is the convolution
at place π of every window: a plane. The pool is the maximum of the planes, each element of its
gradient belongs to one plane, and the kernel's gradient is Σ_π g_π · columnsᵀ. The forward and the
backward pass share the columns, and no tensor is upsampled or compared at full size. A step of LeNet
with batch 64 takes 16 ms with planes and 21 ms without.

Planes are faster for few channels or large kernels (measured: 1.2 to 1.7 times; for 3×3 with 16
channels and more, 1.2 times slower), in graphs that contain the whole step (:class:`Shortcuts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import attrs

from ortflex_core import NodeView, Ops, RuleTable, Tensor, known_sizes
from ortflex_plugins.gradients._windows import FLOAT, FixedWindows, Sizes, padded, windows

_FEW_CHANNELS, _MANY_CHANNELS = 16, 32
_LARGE_KERNEL = 25
# Elements of all columns: fewer take less time than their nodes, more do not fit into the cache.
_LEAST, _MOST = 1 << 12, 1 << 22


@attrs.frozen
class Planes:
    """The cotangent of a convolution's output: [M, windows] for each place of the pool's windows.

    ``columns`` are the columns of the same places, [taps · C, windows]; ``total`` is the sum of the
    cotangents over the places.
    """

    gradients: tuple[Tensor, ...]
    columns: tuple[Tensor, ...]
    total: Tensor


def pooled(op: Ops, node: NodeView, g: Tensor, pool: FixedWindows) -> Tensor | None:
    """The gradient of a MaxPool's input by planes, if the input is a convolution and planes are faster.

    The shortcuts of the trace get the pool's output and the planes, for the kernel's gradient.
    """
    shortcuts = node.trace.shortcuts
    conv = None if shortcuts is None else _convolution(node)
    if shortcuts is None or conv is None:
        return None
    x, weight = conv.inputs[:2]
    y, out = node.inputs[0], node.outputs[0]
    sizes, pooled_sizes = known_sizes(weight), known_sizes(out)
    if sizes is None or pooled_sizes is None or x.dtype != FLOAT:
        return None
    at = windows(conv, x, y, sizes[2:]).fixed
    if at is None or not _pays(sizes, at, pooled_sizes[0]):
        return None
    n = len(pool.kernel)
    positions = (*pooled_sizes[2:], pooled_sizes[0])
    columns = _columns(op, padded(op, x, y, at), at, pool.kernel, positions, sizes[1])
    kernel = _rows(op, op.Transpose(weight, perm=[0, *range(2, 2 + n), 1]), sizes[0])
    bias = [] if conv.input(2) is None else [_rows(op, conv.input(2), sizes[0])]
    planes = [op.Gemm(kernel, c, *bias) for c in columns]
    largest, back = _largest(op, planes)
    whole = op.Reshape(largest, [sizes[0], *positions])
    shortcuts.instead[out] = op.Transpose(whole, perm=[n + 1, *range(n + 1)])
    total = _rows(op, op.Transpose(g, perm=[*range(1, n + 2), 0]), sizes[0])
    parts = back(total)
    gradient = _interleaved(op, parts, pool.kernel, (sizes[0], *positions))
    shortcuts.parts[gradient] = Planes(tuple(parts), tuple(columns), total)
    return gradient


def _convolution(node: NodeView) -> NodeView | None:
    """The convolution that computes the pool's input, if no other node that is needed reads it."""
    x, trace = node.inputs[0], node.trace
    producer = x.node
    if producer is None or producer.op_type != "Conv" or producer.domain:
        return None
    others = {
        id(o)
        for n in trace.nodes
        if x in n.arguments and node.outputs[0] not in n.outputs
        for o in n.outputs
    }
    if others and any(id(a) in others for n in trace.nodes for a in n.arguments):
        return None
    conv = NodeView(trace, producer, frozenset(), RuleTable({}))
    return conv if conv.group == 1 else None


def _pays(sizes: Sizes, at: FixedWindows, samples: int) -> bool:
    """Whether planes are faster than the convolution."""
    channels, taps = sizes[1], math.prod(sizes[2:])
    if channels >= (_MANY_CHANNELS if taps >= _LARGE_KERNEL else _FEW_CHANNELS):
        return False
    return _LEAST <= channels * taps * samples * math.prod(at.counts) <= _MOST


def _columns(
    op: Ops, x: Tensor, at: FixedWindows, pool: Sizes, positions: Sizes, channels: int
) -> list[Tensor]:
    """For each place of the pool's windows the columns of the kernel, [taps · C, windows]."""
    n = len(pool)
    inner = op.Transpose(x, perm=[*range(1, n + 2), 0])
    steps = [p * s for p, s in zip(pool, at.strides, strict=True)]
    slices: dict[Sizes, Tensor] = {}
    out = []
    for place in product(*map(range, pool)):
        side_by_side = []
        for tap in product(*map(range, at.kernel)):
            rows = zip(place, at.strides, tap, at.dilations, strict=True)
            start = tuple(p * s + k * d for p, s, k, d in rows)
            if start not in slices:
                axes = zip(start, steps, positions, strict=False)
                ends = [begin + step * (count - 1) + 1 for begin, step, count in axes]
                slices[start] = op.Slice(inner, list(start), ends, list(range(1, n + 1)), steps)
            side_by_side.append(slices[start])
        out.append(_rows(op, op.Concat(*side_by_side, axis=0), channels * math.prod(at.kernel)))
    return out


def _rows(op: Ops, x: Tensor, rows: int) -> Tensor:
    return op.Reshape(x, [rows, -1])


def _largest(op: Ops, planes: Sequence[Tensor]) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """The maximum of the planes, and a function that splits its cotangent: the first maximum gets it."""
    if len(planes) == 1:
        return planes[0], lambda g: [g]
    half = len(planes) // 2
    first, to_first = _largest(op, planes[:half])
    second, to_second = _largest(op, planes[half:])

    def back(g: Tensor) -> list[Tensor]:
        share = g * op.Cast(op.GreaterOrEqual(first, second), to=g.dtype)
        return [*to_first(share), *to_second(g - share)]

    return op.Max(first, second), back


def _interleaved(op: Ops, parts: Sequence[Tensor], pool: Sizes, shape: Sizes) -> Tensor:
    """Planes [M, windows] combined to [N, M, …], each element at its place."""
    n = len(pool)
    sizes = list(shape)
    for axis in range(n, 0, -1):
        count = pool[axis - 1]
        separated = [*sizes[: axis + 1], 1, *sizes[axis + 1 :]]
        columns = [op.Reshape(part, separated) for part in parts]
        parts = [
            op.Concat(*columns[k : k + count], axis=axis + 1) if count > 1 else columns[k]
            for k in range(0, len(columns), count)
        ]
        sizes[axis] *= count
    (whole,) = parts
    return op.Transpose(op.Reshape(whole, sizes), perm=[n + 1, *range(n + 1)])


def kernel_gradient(op: Ops, planes: Planes, weight: Tensor) -> Tensor:
    """Σ_π g_π · columnsᵀ in the shape of the kernel."""
    total: Tensor | None = None
    for g, columns in zip(planes.gradients, planes.columns, strict=True):
        total = op.Gemm(g, columns, *([] if total is None else [total]), transB=1)
    assert weight.shape is not None
    assert total is not None  # there is always a plane
    rows, channels, *kernel = weight.shape
    n = len(kernel)
    channels_last = op.Reshape(total, op.constant([rows, *kernel, channels]))
    return op.Transpose(channels_last, perm=[0, n + 1, *range(1, n + 1)])


def bias_gradient(op: Ops, planes: Planes) -> Tensor:
    """The sum over all samples and places; each window has a gradient at one place only."""
    return op.ReduceSum(planes.total, axes=[1], keepdims=0)
