"""The gradient of a kernel as one convolution: X is its input, and dY its kernel.

    dW[m, c, κ] = Σ over n and windows o of dY[n, m, o] · X[n, c, o·stride + κ·dilation − begin]

The samples n are the channels of this convolution, the windows o the elements of its kernel, and the
elements κ its places; strides and dilations are exchanged. The channels c are an additional, innermost
axis of X, on which the kernel has one element. onnxruntime multiplies such a convolution in tiles, whose
copies stay in the cache of each thread.

The time of one product for each κ divided by the time of this form (onnxruntime 1.32, 3×3, one thread): 1.1
with 64 channels on planes of 16 × 16 and with 128 on 8 × 8 (two threads: 1.8 and 1.7, quickest runs), 1.2
to 1.3 with stride 2, 1.0 on planes of 56 × 56, and 0.4 for a single channel.
"""

from __future__ import annotations

from typing import Any

import attrs

from ortflex_core import Ops, Tensor, dims, known_sizes, reshape_like
from ortflex_plugins.gradients._windows import END, Windows, padded, slices


def correlation(op: Ops, x: Tensor, g: Tensor, weight: Tensor, at: Windows, group: int) -> Tensor:
    """The gradient dW of any convolution, also where sizes are not known while the graph is built."""
    n = len(at.strides)
    axes = list(at.axes)
    x, at, fits = _fitted(op, x, g, at)
    moved = op.Transpose(x, perm=[0, *axes, 1])
    if group > 1:
        parts: Any = {"num_outputs": group} if op.opset >= 18 else {}
        moved = op.Concat(*op("Split", moved, axis=-1, outputs=group, **parts), axis=0)
    kernels = op.Transpose(g, perm=[1, 0, *axes])
    if n == 3 and at.kernel is not None and at.counts is not None:
        every = _by_depth(op, moved, kernels, at, group)
    else:
        every = _convolved(op, op.Unsqueeze(moved, axes=[0]), kernels, at, group)
    if not fits:
        ends = op.Slice(dims(op, weight), [2], [END]) if at.kernel is None else list(at.kernel)
        every = op.Slice(every, [0] * n, ends, axes)
    result = op.Transpose(every, perm=[0, 1, n + 2, *axes])
    if known_sizes(weight) is None:  # Otherwise a Reshape, which an output of the graph leaves out.
        return op.Squeeze(result, axes=[0])
    return reshape_like(op, result, weight)


def _convolved(op: Ops, x: Tensor, kernels: Tensor, at: Windows, group: int) -> Tensor:
    """X [1, group · N, places…, C] convolved with dY [M, N, windows…]: [1, M, kernel…, C]."""
    assert at.pads is not None
    first, last = zip(*at.pads, strict=True)
    return op.Conv(
        x,
        op.Unsqueeze(kernels, axes=[len(at.strides) + 2]),
        strides=[*at.dilations, 1],
        dilations=[*at.strides, 1],
        pads=[*first, 0, *last, 0],
        group=group,
    )


def _by_depth(op: Ops, x: Tensor, kernels: Tensor, at: Windows, group: int) -> Tensor:
    """The same for three axes: one convolution for each element of the kernel on the first axis.

    The places on the first axis are summed over, as the samples are. One convolution for everything
    would have four axes, for which onnxruntime's kernel is slower (0.7 of the speed).
    """
    assert at.kernel is not None
    assert at.pads is not None
    assert at.counts is not None
    depth, plane = (
        attrs.evolve(
            at,
            kernel=at.kernel[part],
            strides=at.strides[part],
            dilations=at.dilations[part],
            pads=at.pads[part],
            sizes=None,
            counts=at.counts[part],
        )
        for part in (slice(1), slice(1, None))
    )
    before, after = at.pads[0]
    if before or after:
        x = op.Pad(x, [0, before, 0, 0, 0, 0, after, 0, 0, 0])
    flat = op.Reshape(kernels, [0, -1, *at.counts[1:]])
    parts = [
        _convolved(op, op.Reshape(part, [1, -1, 0, 0, 0]), flat, plane, group)
        for part in slices(op, x, attrs.evolve(depth, pads=((0, 0),)), [1])
    ]
    return op.Concat(*(op.Unsqueeze(part, axes=[2]) for part in parts), axis=2)


def _fitted(op: Ops, x: Tensor, g: Tensor, at: Windows) -> tuple[Tensor, Windows, bool]:
    """X and its windows without the places after the last window, and whether all of them are gone.

    Those that remain give additional elements of the kernel.
    """
    if at.pads is None:
        padding = ((0, 0),) * len(at.strides)
        return padded(op, x, g, at), attrs.evolve(at, pads=padding), False
    fixed = at.fixed
    if fixed is None:
        return x, at, set(at.strides) == {1}
    pads, ends, fits = [], [], True
    rows = zip(fixed.strides, fixed.counts, fixed.spans, fixed.pads, fixed.sizes, strict=True)
    for stride, count, span, (first, last), size in rows:
        extra = first + size + last - stride * (count - 1) - span
        cut = min(extra, last)
        pads.append((first, last - cut))
        ends.append(max(size - (extra - cut), 1))
        fits &= size - (extra - cut) > 0
    if tuple(ends) != fixed.sizes:
        x = op.Slice(x, [0] * len(ends), ends, list(at.axes))
    return x, attrs.evolve(at, pads=tuple(pads)), fits
