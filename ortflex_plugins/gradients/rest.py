"""Gradient rules of the remaining operators: signals, determinants, selections, caches.

Also declared here: the operators without a gradient, because their inputs or outputs are strings,
images, integers or choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from ortflex_core.autodiff import (
    Gradient,
    NodeView,
    Rules,
    dims,
    full,
    positions,
    put_back,
    zeros_like,
)
from ortflex_core.errors import NoGradientRule
from ortflex_core.graph import Ops, Tensor
from ortflex_plugins.gradients._signal import dft, stft

RULES = Rules()
RULES.rule("DFT", since=17)(dft)
RULES.rule("STFT")(stft)

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
    # Products after the first zero are constant 0, except for the gradient of that zero itself.
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
    """Of equal elements the first one gets the whole gradient, as the output contains it."""
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
    """The reversal is its own inverse."""
    whole = full(op, g, node.outputs[0])
    axes = {"batch_axis": node.batch_axis, "time_axis": node.time_axis}
    return [op.ReverseSequence(whole, node.inputs[1], **axes), None]


@RULES.rule("TensorScatter")
def _tensor_scatter(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The cache has no gradient where it was overwritten, and the update has it there."""
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
        return op.GatherElements(whole, op.Expand(places, dims(op, update)), axis=axis)

    def to_cache() -> Tensor:
        settings = {"axis": node.axis, "mode": node.mode}
        return op.TensorScatter(whole, zeros_like(op, update), starts, **settings)

    return [to_cache, to_update, None]


def _cofactors(op: Ops, x: Tensor) -> Tensor:
    """The cofactors of matrices of unknown size, by row i and column j.

    Each is the determinant of the matrix in which row i is 1 in column j and 0 in the others.
    """
    count = op.Range(0, op.Gather(op.Shape(x), op.constant(-1), axis=0), 1)
    same = op.Equal(op.Unsqueeze(count, axes=[0]), op.Unsqueeze(count, axes=[1]))
    # […, i, j, row, column]
    here, units = op.Unsqueeze(same, axes=[1, 3]), op.Unsqueeze(same, axes=[0, 2])
    rows = op.Where(here, op.Cast(units, to=x.dtype), op.Unsqueeze(x, axes=[-4, -3]))
    return op.Det(rows)


@RULES.rule("Det")
def _det(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The slope of a determinant is the matrix of cofactors.

    Cofactors are the signed determinants of the minors.
    The standard has no inverse, and the cofactors exist without one.
    """
    x = node.inputs[0]
    size = None if x.shape is None else x.shape[-1]
    whole = op.Unsqueeze(full(op, g, node.outputs[0]), axes=[-2, -1])
    if not isinstance(size, int):
        return [whole * _cofactors(op, x)]
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
