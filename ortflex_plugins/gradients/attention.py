"""Gradient rules of attention and of rotary position embedding.

The standard defines both by simpler operators. The runtime computes each in one kernel; the gradient
goes through the definition and computes its products again.

Source: Vaswani et al., "Attention is all you need" (2017); Su et al., "RoFormer" (2021).
"""

from __future__ import annotations

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
    count_to,
    full,
    known_size,
    numpy_dtype,
    size_of,
)

RULES = Rules()

_SIZE = "with heads of unknown size"
_HEADS = "with an unknown number of heads"


def _lowest(x: Tensor) -> float:
    """The lowest finite number: e^x is 0 as for −∞, but a fully masked row is not 0/0."""
    if x.dtype == onnx.TensorProto.BFLOAT16:  # numpy's finfo does not know this type
        return -(2.0 - 2.0**-7) * 2.0**127
    return float(np.finfo(numpy_dtype(x.dtype)).min)


@RULES.rule("Attention", attributes=("qk_matmul_output_mode", "softmax_precision"))
def _attention(op: Ops, node: NodeView, *gs: Tensor | None) -> Sequence[Gradient]:
    """Not supported: nonpad_kv_seqlen, is_causal with past keys, and a gradient of qk_matmul_output."""
    if node.input(6) is not None:
        raise NoGradientRule("with nonpad_kv_seqlen")
    if node.is_causal and node.input(4) is not None:
        raise NoGradientRule("with is_causal and past keys, where runtimes differ")
    if any((getattr(node, f"{side}_window_size") or -1) >= 0 for side in ("left", "right")):
        raise NoGradientRule("with a sliding window")
    if len(gs) > 3 and gs[3] is not None:
        raise NoGradientRule("with a gradient of its output qk_matmul_output")
    return node.through(_attention_outputs(op, node), *gs[:3])


def _attention_outputs(op: Ops, node: NodeView) -> list[Tensor]:
    """Y = softmax(scale · Q Kᵀ + mask) V, and the keys and values after those of the past."""
    counts = (node.q_num_heads, node.kv_num_heads, node.kv_num_heads)
    q, k, v = (_heads(op, t, count) for t, count in zip(node.inputs[:3], counts, strict=True))
    past_k, past_v = node.input(4), node.input(5)
    keys = k if past_k is None else op.Concat(past_k, k, axis=2)
    values = v if past_v is None else op.Concat(past_v, v, axis=2)
    size = _known(q, 3, _SIZE)
    repeat = _known(q, 1, _HEADS) // _known(k, 1, _HEADS)
    scale = size**-0.5 if node.scale is None else node.scale
    across = op.Transpose(_repeated(op, keys, repeat), perm=[0, 1, 3, 2])
    scores = op.MatMul(q * scale, across)
    if node.softcap:
        scores = node.softcap * op.Tanh(scores / node.softcap)
    scores = _masked(op, node, scores, q, keys)
    probabilities = op.Softmax(scores, axis=-1)
    if node.input(3) is not None:
        # A query whose keys are all masked has the result 0 and the gradient 0.
        masked = op.ReduceMax(scores, axes=[-1], keepdims=1) <= _lowest(scores)
        probabilities = op.Where(masked, 0.0, probabilities)
    y = op.MatMul(probabilities, _repeated(op, values, repeat))
    if node.inputs[0].rank == 3:
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])
    return [y, keys, values]


def _known(x: Tensor, axis: int, obstacle: str) -> int:
    """The size of an axis; ``obstacle`` says why the rule does not work without it."""
    size = known_size(x, axis)
    if size is None:
        raise NoGradientRule(obstacle)
    return size


def _heads(op: Ops, x: Tensor, count: int | None) -> Tensor:
    """[B, S, heads · n] as [B, heads, S, n]; a tensor of four dimensions has that shape already."""
    if x.rank == 4:
        return x
    if x.rank != 3 or not count:
        raise NoGradientRule("with inputs of unknown rank")
    size = _known(x, 2, _SIZE) // count
    return op.Transpose(op.Reshape(x, [0, 0, count, size]), perm=[0, 2, 1, 3])


def _repeated(op: Ops, x: Tensor, times: int) -> Tensor:
    """Every head repeated side by side, because several queries use the same keys and values."""
    if times == 1:
        return x
    heads, size = _known(x, 1, _HEADS), _known(x, 3, _SIZE)
    copies = op.Expand(op.Unsqueeze(x, axes=[2]), [1, 1, times, 1, 1])
    return op.Reshape(copies, [0, heads * times, -1, size])


def _masked(op: Ops, node: NodeView, scores: Tensor, q: Tensor, keys: Tensor) -> Tensor:
    mask = node.input(3)
    if mask is not None and mask.dtype == onnx.TensorProto.BOOL:
        scores = op.Where(mask, scores, _lowest(scores))
    elif mask is not None:
        scores = scores + op.Max(mask, _lowest(mask))
    if node.is_causal:
        columns = op.Unsqueeze(count_to(op, size_of(op, keys, 2)), axes=[0])
        rows = op.Unsqueeze(count_to(op, size_of(op, q, 2)), axes=[1])
        scores = op.Where(op.LessOrEqual(columns, rows), scores, _lowest(scores))
    return scores


@RULES.rule("RotaryEmbedding", attributes=("num_heads",))
def _rotary(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient is rotated by the opposite angle."""
    if node.needs(1) or node.needs(2):
        return node.through([_rotated(op, node)], g)
    x, cos, sin, *positions = node.inputs
    settings = node.settings("interleaved", "num_heads", "rotary_embedding_dim")
    return [op.RotaryEmbedding(full(op, g, x), cos, -sin, *positions, **settings), None, None]


def _rotated(op: Ops, node: NodeView) -> Tensor:
    """(x₁ cos − x₂ sin, x₁ sin + x₂ cos) for the two halves, or the pairs, of a head's elements."""
    x, cos, sin = node.inputs[:3]
    places = node.input(3)
    if places is not None:
        cos, sin = (op.Gather(t, places, axis=0) for t in (cos, sin))
    # The axis of the heads is axis 1 of [B, heads, S, n], and axis 2 of [B, S, heads, n].
    head_axis = 1 if x.rank == 4 else 2
    cos, sin = (op.Unsqueeze(t, axes=[head_axis]) for t in (cos, sin))
    value = x
    if x.rank == 3:
        size = _known(x, 2, _SIZE) // node.num_heads
        value = op.Reshape(x, [0, 0, node.num_heads, size])
    size = _known(value, 3, _SIZE)
    rotated = node.rotary_embedding_dim or size
    half = rotated // 2

    def part(start: int, end: int, step: int = 1) -> Tensor:
        return op.Slice(value, [start], [end], [-1], [step])

    if node.interleaved:
        first, second = part(0, rotated, 2), part(1, rotated, 2)
    else:
        first, second = part(0, half), part(half, rotated)
    real, imaginary = first * cos - second * sin, first * sin + second * cos
    if node.interleaved:
        pairs = op.Concat(*(op.Unsqueeze(t, axes=[-1]) for t in (real, imaginary)), axis=-1)
        pieces = [op.Reshape(pairs, [0, 0, 0, rotated])]
    else:
        pieces = [real, imaginary]
    if rotated < size:
        pieces.append(part(rotated, size))
    y = pieces[0] if len(pieces) == 1 else op.Concat(*pieces, axis=-1)
    return op.Reshape(y, [0, 0, -1]) if x.rank == 3 else y
