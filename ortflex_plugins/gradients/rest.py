"""Gradient rules of what fits in no other family: signals, determinants, selections, caches.

Also declared here: the operators through which no gradient passes, because what they take or give
are texts, images, whole numbers or choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from ortflex_core.autodiff import Gradient, NodeView, Rules
from ortflex_core.cotangents import dims, full, positions, put_back, zeros_like
from ortflex_core.errors import NoGradientRule
from ortflex_core.ops import Ops, Tensor

RULES = Rules()

RULES.not_differentiable(
    *("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
    *("ImageDecoder", "NonMaxSuppression", "Hardmax", "BitCast", "Constant"),
    *("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
    *("SequenceLength", "SequenceEmpty", "OptionalHasElement"),
)

_INT64 = onnx.TensorProto.INT64


@RULES.rule("Shrink")
def _shrink(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    return [op.Where(op.Abs(node.inputs[0]) > node.lambd, g, 0.0)]


@RULES.rule("Swish")
def _swish(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    gate = op.Sigmoid(node.alpha * node.inputs[0])
    return [g * (gate + node.alpha * (node.outputs[0] * (1 - gate)))]


@RULES.rule("CumProd")
def _cumprod(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """dx_i = Σ_j g_j y_j / x_i over the products that have x_i; right at zeros, too."""
    x, axis = node.inputs
    whole = full(op, g, node.outputs[0])
    way = {"exclusive": node.exclusive, "reverse": node.reverse}
    back = {"exclusive": node.exclusive, "reverse": 1 - node.reverse}
    zero = op.Equal(x, 0.0)
    # Products behind the first zero are 0 whatever comes, but for what that zero itself is owed.
    count = op.CumSum(op.Cast(zero, to=x.dtype), axis, reverse=node.reverse)
    first = op.And(zero, op.Equal(count, 1.0))
    filled = op.Where(zero, 1.0, x)
    others = op.CumProd(op.Where(first, 1.0, x), axis, **way)
    plain = op.CumSum(whole * node.outputs[0], axis, **back) / filled
    at_zero = op.CumSum(whole * others, axis, **back)
    return [op.Where(first, at_zero, op.Where(zero, 0.0, plain)), None]


@RULES.rule("Compress")
def _compress(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, condition = node.inputs
    at = {} if node.axis is None else {"axis": node.axis}
    moved = op.Compress(positions(op, x), condition, **at)
    return [put_back(op, full(op, g, node.outputs[0]), moved, x, repeated=False), None]


@RULES.rule("Unique")
def _unique(op: Ops, node: NodeView, g: Tensor | None, *_: Tensor | None) -> Sequence[Gradient]:
    """Of equal elements the first one is owed all: it is the one that stands in the output."""
    if g is None:
        return [None]
    x, first = node.inputs[0], node.more_outputs(2)[1]
    moved = positions(op, x)
    if node.axis is None:
        moved = op.Gather(op.Reshape(moved, op.constant([-1])), first, axis=0)
    else:
        moved = op.Gather(moved, first, axis=node.axis)
    return [put_back(op, full(op, g, node.outputs[0]), moved, x, repeated=False)]


@RULES.rule("ReverseSequence")
def _reverse_sequence(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Turned twice, everything is where it was."""
    whole = full(op, g, node.outputs[0])
    axes = {"batch_axis": node.batch_axis, "time_axis": node.time_axis}
    return [op.ReverseSequence(whole, node.inputs[1], **axes), None]


@RULES.rule("TensorScatter")
def _tensor_scatter(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The cache owes nothing where it was written over; the update is read where it was written."""
    cache, update, starts = node.inputs[0], node.inputs[1], node.input(2)
    whole = full(op, g, node.outputs[0])
    rank = update.rank
    if rank is None:
        raise NoGradientRule("with an update of unknown rank")
    axis = node.axis % rank

    def to_update() -> Tensor:
        length = op.Gather(dims(op, update), op.constant(axis), axis=0)
        places = op.Range(op.constant(0), length, op.constant(1))
        places = op.Unsqueeze(places, axes=[k for k in range(rank) if k != axis])
        if starts is not None:
            begin = op.Cast(starts, to=_INT64)
            places = places + op.Unsqueeze(begin, axes=list(range(1, rank)))
        if node.mode == "circular":
            places = op.Mod(places, op.Gather(dims(op, cache), op.constant(axis), axis=0))
        return op.GatherElements(whole, op.Expand(places, dims(op, update)), axis=axis)  # type: ignore[no-any-return]

    def to_cache() -> Tensor:
        settings = {"axis": node.axis, "mode": node.mode}
        return op("TensorScatter", whole, zeros_like(op, update), starts, **settings)  # type: ignore[no-any-return]

    return [to_cache, to_update, None]


@RULES.rule("Det")
def _det(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The slope of a determinant is the matrix of cofactors; the size must be known.

    Cofactors are the signed determinants of the minors.
    The standard has no inverse, and the cofactors also exist where there is none.
    """
    x = node.inputs[0]
    size = None if x.shape is None else x.shape[-1]
    if not isinstance(size, int):
        raise NoGradientRule("of matrices of unknown size")
    whole = op.Unsqueeze(full(op, g, node.outputs[0]), axes=[-2, -1])
    if size == 1:
        return [whole]
    rank = len(x.shape)
    others = op.constant([[j for j in range(size) if j != k] for k in range(size)], _INT64)
    # […, i, rows without i, j, columns without j]
    minors = op.Gather(op.Gather(x, others, axis=rank - 2), others, axis=rank)
    order = [*range(rank - 2), rank - 2, rank, rank - 1, rank + 1]
    determinants = op.Det(op.Transpose(minors, perm=order))
    signs = (-1.0) ** np.add.outer(np.arange(size), np.arange(size))
    return [whole * (determinants * op.constant(signs, x.dtype))]


@RULES.rule("DFT", since=17)
def _dft(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The transform is y = F x with a symmetric F, and conj(F) g its way back; of known length.

    conj(F) is the inverse transform without its 1/n. A half spectrum is what is left of the whole
    one, a real signal has no imaginary part, and a signal shorter than the transform ends in zeros.
    """
    x, axis = node.inputs[0], _axis(node)
    if x.shape is None or axis is None:
        raise NoGradientRule("of a signal of unknown rank, or along an axis that is not constant")
    axis %= len(x.shape)
    size = x.shape[axis]
    length = 2 * (size - 1) if node.onesided and node.inverse and isinstance(size, int) else size
    if node.input(1) is not None:
        length = None if node.input(1).constant is None else int(node.input(1).constant)
    if not isinstance(length, int) or not isinstance(size, int):
        raise NoGradientRule("of a signal of unknown length")
    whole = full(op, g, node.outputs[0])
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


def _to_half(op: Ops, spectrum: Tensor, axis: int, size: int, length: int) -> Tensor:
    """The cotangent of half a spectrum that a real signal was made of.

    The half that is not there is the mirror image of this one: what has an image counts twice.
    """
    if length // 2 + 1 != size:
        raise NoGradientRule(
            f"of half a spectrum of {size} for {length} places, which onnxruntime has wrong,"
        )
    counts = np.full(size, 2.0 / length, np.float32)
    counts[[0, -1] if length % 2 == 0 else [0]] = 1.0 / length
    shape = [1] * (spectrum.rank or 0)
    shape[axis] = size
    return spectrum * op.constant(counts.reshape(shape), spectrum.dtype)


def _axis(node: NodeView) -> int | None:
    """An attribute up to opset 19, an input from 20 on."""
    given = node.input(2)
    if given is not None:
        return None if given.constant is None else int(given.constant)
    return -2 if node.axis is None else int(node.axis)


def _padded(op: Ops, x: Tensor, axis: int, count: int) -> Tensor:
    if count <= 0:
        return x
    pads = [0] * (2 * (x.rank or 0))
    pads[(x.rank or 0) + axis] = count
    return op.Pad(x, op.constant(pads))  # type: ignore[no-any-return]


@RULES.rule("STFT")
def _stft(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Frames of the signal, times the window, each transformed."""
    signal, step, window = node.inputs[0], node.inputs[1], node.input(2)
    length = _frame_length(node)
    if step.constant is None or length is None:
        raise NoGradientRule("with a step or frame that is not constant")
    if signal.rank != 3:
        raise NoGradientRule("of a signal that is not [batch, time, parts]")
    hop, size = int(step.constant), signal.shape[1]
    if not isinstance(size, int):
        raise NoGradientRule("of a signal of unknown length")
    starts = np.arange((size - length) // hop + 1) * hop
    frames = op.Gather(signal, op.constant(starts[:, None] + np.arange(length), _INT64), axis=1)
    if window is not None:
        frames = frames * op.Unsqueeze(window, axes=[1])
    return node.through([op.DFT(frames, axis=2, onesided=node.onesided)], g)


def _frame_length(node: NodeView) -> int | None:
    given, window = node.input(3), node.input(2)
    if given is not None:
        return None if given.constant is None else int(given.constant)
    size = None if window is None or window.shape is None else window.shape[0]
    return size if isinstance(size, int) else None
