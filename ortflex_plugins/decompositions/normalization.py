"""Decompositions of normalizations: of sums with a residual, by the root mean square, of embeddings.

Source: Ba, Kiros, Hinton, arXiv:1607.06450; Zhang and Sennrich, arXiv:1910.07467 (root mean square).
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from ortflex_core import Call, Decompositions, NotDecomposed, Ops, Tensor, count_to, size_of
from ortflex_plugins.decompositions._real import real

DECOMPOSITIONS = Decompositions()

_FIRST = 17
"""The first opset of LayerNormalization."""


def _axes(x: Tensor, axis: int) -> list[int]:
    rank = x.rank or 0
    return list(range(axis % rank, rank)) if rank else [-1]


def _layer(
    op: Ops, x: Tensor, scale: Tensor, bias: Tensor | None, epsilon: float, axis: int = -1
) -> Tensor:
    if op.opset >= _FIRST:
        return op.LayerNormalization(x, scale, bias, axis=axis, epsilon=epsilon)
    return _normalized(op, x, scale, bias, epsilon, axis)[0]


def _normalized(
    op: Ops, x: Tensor, scale: Tensor, bias: Tensor | None, epsilon: float, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of LayerNormalization: the result, the mean, one over the standard deviation."""
    axes = _axes(x, axis)
    mean = op.ReduceMean(x, axes=axes, keepdims=1)
    centered = x - mean
    inverse = _root_mean_square(op, centered, axes, epsilon)
    y = centered * inverse * scale
    return y if bias is None else y + bias, mean, inverse


def _root_mean_square(op: Ops, x: Tensor, axes: list[int], epsilon: float) -> Tensor:
    """One over the root of the mean of squares."""
    return op.Reciprocal(op.Sqrt(op.ReduceMean(x * x, axes=axes, keepdims=1) + epsilon))


def _summed(node: Call, bias: int) -> Tensor:
    """The input, the skip and the bias together; the skip may have fewer rows."""
    x = node.required(0) + node.required(1)
    added = node.input(bias)
    return x if added is None else x + added


def _refuse_moments(node: Call) -> None:
    if node.wants(1) or node.wants(2):
        raise NotDecomposed("with the outputs mean and inv_std_var, which no CPU kernel computes")


@DECOMPOSITIONS.operator("SkipLayerNormalization")
def skip_layer_normalization(op: Ops, node: Call) -> Sequence[Tensor | None]:
    """LayerNormalization of ``input + skip + bias``. The output input_skip_bias_sum is this sum."""
    _refuse_moments(node)
    x = _summed(node, 4)
    y = _layer(op, x, node.required(2), node.input(3), node.setting("epsilon", 1e-12))
    return [y, None, None, x]


@DECOMPOSITIONS.operator("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(op: Ops, node: Call) -> Sequence[Tensor | None]:
    """RMS normalization of ``input + skip + bias``. The output input_skip_bias_sum is this sum."""
    _refuse_moments(node)
    x = _summed(node, 3)
    y = x * _root_mean_square(op, x, [-1], node.setting("epsilon", 1e-12))
    return [y * node.required(2), None, None, x]


@DECOMPOSITIONS.operator("SimplifiedLayerNormalization", domain="")
def simplified_layer_normalization(op: Ops, node: Call) -> Sequence[Tensor]:
    """``x / √(mean(x²) + epsilon) · scale``."""
    x = node.required(0)
    node.setting("stash_type", 1)
    axes = _axes(x, node.setting("axis", -1))
    slope = _root_mean_square(op, x, axes, node.setting("epsilon", 1e-5))
    return [x * slope * node.required(1), slope]


@DECOMPOSITIONS.operator("LayerNormalization", domain="")
def layer_normalization(op: Ops, node: Call) -> Sequence[Tensor]:
    """LayerNormalization in a file whose opset does not include this operator."""
    x, scale, bias = node.required(0), node.required(1), node.input(2)
    node.setting("stash_type", 1)
    epsilon, axis = node.setting("epsilon", 1e-5), node.setting("axis", -1)
    return _normalized(op, x, scale, bias, epsilon, axis)


@DECOMPOSITIONS.operator("EmbedLayerNormalization")
def embed_layer_normalization(op: Ops, node: Call) -> Sequence[Tensor | None]:
    """LayerNormalization of the sum of word, position and segment embeddings.

    Output 1 is the number of tokens of each row that the mask keeps; output 2 is the sum.
    """
    node.setting("mask_index_type", 0)
    tables = (node.required(2), node.required(3), node.input(4))
    x = _embedded(op, node, tables, node.input(8))
    y = _layer(op, x, node.required(5), node.required(6), node.setting("epsilon", 1e-12))
    return [y, _tokens(op, node), x]


@DECOMPOSITIONS.operator("QEmbedLayerNormalization")
def quantized_embed_layer_normalization(op: Ops, node: Call) -> Sequence[Tensor | None]:
    """EmbedLayerNormalization with quantized tables, scale and bias, trained as float master weights."""
    floats: list[Tensor | None] = []
    for k in range(2, 7):  # the scale of input k is input k + 6, its zero point is input k + 11
        places = (k, k + 6, k + 11)
        floats.append(None if node.input(k) is None else real(op, node, places))
    words, positions, segments, weight, bias = floats
    if words is None or positions is None or weight is None:
        raise NotDecomposed("without tables of words and positions, or without a scale")
    x = _embedded(op, node, (words, positions, segments), None)
    y = _layer(op, x, weight, bias, node.setting("epsilon", 1e-12))
    return [y, _tokens(op, node)]


def _embedded(
    op: Ops, node: Call, tables: tuple[Tensor, Tensor, Tensor | None], positions: Tensor | None
) -> Tensor:
    """The sum of the embeddings of words, positions and segments."""
    words, segments = node.required(0), node.input(1)
    if positions is None:
        positions = count_to(op, size_of(op, words, 1))
    x = op.Gather(tables[0], words) + op.Gather(tables[1], positions)
    if segments is not None and tables[2] is not None:
        x = x + op.Gather(tables[2], segments)
    return x


def _tokens(op: Ops, node: Call) -> Tensor:
    """The number of tokens of each row that the mask keeps; 0 without a mask."""
    mask = node.input(7)
    counted = node.required(0) * 0 if mask is None else mask
    count = op.ReduceSum(counted, axes=[1], keepdims=0)
    return op.Cast(count, to=TensorProto.INT32)
