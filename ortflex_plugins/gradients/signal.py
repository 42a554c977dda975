"""Gradient rules of the Fourier transforms.

Lengths and axes that are known while the graph is built become constants; the others are computed
when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    count_to,
    full,
    known_size,
    size_of,
)

RULES = Rules()

RULES.not_differentiable("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix")

_INT64 = onnx.TensorProto.INT64


@RULES.rule("DFT", since=17)
def _dft(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """For y = F x, where F is the symmetric matrix of the transform, dx = conj(F) g.

    conj(F) is the inverse transform without its factor 1/n. Half a spectrum is a part of the whole
    spectrum, a real signal has no imaginary part, and a signal shorter than the transform is padded
    with zeros.
    """
    x, axis = node.inputs[0], _axis(node)
    whole = full(op, g, node.outputs[0])
    if x.shape is None or axis is None:
        return [_at_run_time(op, node, whole), None, None]
    axis %= len(x.shape)
    size = x.shape[axis]
    length = 2 * (size - 1) if node.onesided and node.inverse and isinstance(size, int) else size
    if node.input(1) is not None:
        length = None if node.input(1).constant is None else int(node.input(1).constant)
    if not all(isinstance(n, int) for n in (length, size, x.shape[-1])):
        return [_at_run_time(op, node, whole), None, None]
    if node.onesided and node.inverse:
        return [_to_half(op, op.DFT(whole, axis=axis, onesided=1), axis, size, length), None, None]
    if node.onesided:
        whole = _padded(op, whole, axis, length - (length // 2 + 1))
    back = op.DFT(whole, axis=axis, inverse=1 - node.inverse)
    back = back / length if node.inverse else back * length
    if x.shape[-1] == 1:
        back = op.Slice(back, starts=[0], ends=[1], axes=[-1])
    if length > size:
        back = op.Slice(back, starts=[0], ends=[size], axes=[axis])
    return [_padded(op, back, axis, size - length), None, None]


def _at_run_time(op: Ops, node: NodeView, whole: Tensor) -> Tensor:
    """The adjoint if the axis or a size is known only when the graph runs."""
    x, given, axis = node.inputs[0], node.input(1), node.input(2)
    along = (
        op.constant([_axis(node)]) if axis is None else op.Cast(op.Reshape(axis, [-1]), to=_INT64)
    )
    size = op.Gather(op.Shape(x), along)
    settings: dict[str, Any] = {"axis": _axis(node) if axis is None else axis}
    if node.onesided and node.inverse:
        # An element with an image in the missing half counts twice: all but the first one, and but the
        # middle one of an even length. A spectrum of another size is an error of the Reshape.
        length = 2 * (size - 1) if given is None else op.Cast(op.Reshape(given, [-1]), to=_INT64)
        half = length / 2 + 1
        place = count_to(op, op.Squeeze(half, axes=[0]))
        alone = op.Or(op.Equal(place, 0), op.Equal(2 * place, length))
        counts = op.Where(alone, op.constant(1.0, x.dtype), op.constant(2.0, x.dtype))
        back = op.DFT(whole, **settings, onesided=1)
        back = back * op.Reshape(counts, _shape_along(op, x, along, half))
        return op.Reshape(back / op.Cast(length, to=x.dtype), op.Shape(x))
    length = size if given is None else op.Cast(op.Reshape(given, [-1]), to=_INT64)
    if node.onesided:
        whole = _padded_at_run_time(op, whole, along, length - (length / 2 + 1))
    back = op.DFT(whole, **settings, inverse=1 - node.inverse)
    scale = op.Cast(length, to=x.dtype)
    back = back / scale if node.inverse else back * scale
    parts = op.Slice(op.Shape(x), [-1], [np.iinfo(np.int64).max])
    back = op.Slice(back, [0], parts, [-1])
    back = op.Slice(back, [0], size, along)
    if given is not None:
        back = _padded_at_run_time(op, back, along, op.Max(size - length, 0))
    return op.Reshape(back, op.Shape(x))


def _shape_along(op: Ops, x: Tensor, along: Tensor, size: Tensor) -> Tensor:
    """The shape with ``size`` at one axis of x and 1 at the others."""
    rank = op.Shape(op.Shape(x))
    return op.ScatterElements(op.Expand(op.constant([1]), rank), op.Mod(along, rank), size, axis=0)


def _padded_at_run_time(op: Ops, x: Tensor, along: Tensor, count: Tensor) -> Tensor:
    """``count`` zeros after the end of one axis."""
    rank = op.Shape(op.Shape(x))
    zeros = op.Expand(op.constant([0]), rank * 2)
    return op.Pad(x, op.ScatterElements(zeros, op.Mod(along, rank) + rank, count, axis=0))


def _padded(op: Ops, x: Tensor, axis: int, count: int) -> Tensor:
    """``count`` zeros after the end of one axis, if ``count`` is positive."""
    if count <= 0:
        return x
    pads = [0] * (2 * (x.rank or 0))
    pads[(x.rank or 0) + axis] = count
    return op.Pad(x, pads)


def _to_half(op: Ops, spectrum: Tensor, axis: int, size: int, length: int) -> Tensor:
    """The cotangent of half a spectrum from which a real signal was computed.

    The missing half is the mirror image of the given one, so an element with an image counts twice.
    """
    if length // 2 + 1 != size:
        raise NoGradientRule(
            f"of half a spectrum of {size} for {length} places, which onnxruntime computes "
            "incorrectly,"
        )
    counts = np.full(size, 2.0 / length, np.float32)
    counts[[0, -1] if length % 2 == 0 else [0]] = 1.0 / length
    shape = [1] * (spectrum.rank or 0)
    shape[axis] = size
    return spectrum * op.constant(counts.reshape(shape), spectrum.dtype)


def _axis(node: NodeView) -> int | None:
    """The axis of a DFT: an attribute up to opset 19, an input from 20 on; None if it is not constant."""
    given = node.input(2)
    if given is not None:
        return None if given.constant is None else int(given.constant)
    return -2 if node.axis is None else int(node.axis)


@RULES.rule("STFT")
def _stft(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The signal is divided into frames, which are multiplied by the window and transformed."""
    signal, step, window = node.inputs[0], node.inputs[1], node.input(2)
    if signal.rank != 3:
        raise NoGradientRule("of a signal that is not [batch, time, parts]")
    length, size = _frame_length(node), known_size(signal, 1)
    if step.constant is not None and isinstance(length, int) and size is not None:
        hop = int(step.constant)
        starts = np.arange((size - length) // hop + 1) * hop
        places = op.constant(starts[:, None] + np.arange(length), _INT64)
    elif length is None:
        raise NoGradientRule("without a window and a frame_length")
    else:
        places = _frames(op, signal, step, length)
    frames = op.Gather(signal, places, axis=1)
    if window is not None:
        frames = frames * op.Unsqueeze(window, axes=[1])
    return node.through([op.DFT(frames, axis=2, onesided=node.onesided)], g)


def _frames(op: Ops, signal: Tensor, step: Tensor, length: int | Tensor) -> Tensor:
    """The index in the signal of each place in each frame, [frames, length]."""
    hop = op.Cast(op.Reshape(step, []), to=_INT64)
    count = op.constant(length) if isinstance(length, int) else op.Reshape(length, [])
    count = op.Cast(count, to=_INT64)
    starts = op.Range(0, size_of(op, signal, 1) - count + 1, hop)
    return op.Unsqueeze(starts, axes=[1]) + op.Unsqueeze(count_to(op, count), axes=[0])


def _frame_length(node: NodeView) -> int | Tensor | None:
    """The length of a frame: given, or the length of the window."""
    given, window = node.input(3), node.input(2)
    if given is not None:
        return given if given.constant is None else int(given.constant)
    if window is None:
        return None
    return known_size(window, 0) or node.trace.op.Shape(window)
