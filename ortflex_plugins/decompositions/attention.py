"""Decompositions of onnxruntime's forms of attention, and of rotary positions.

Source: Vaswani et al., arXiv:1706.03762; Ainslie et al., arXiv:2305.13245 (groups of queries);
Raffel et al., arXiv:1910.10683 (buckets of relative positions).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from ortflex_core import (
    Call,
    Decompositions,
    NotDecomposed,
    Ops,
    Tensor,
    count_to,
    known_size,
    size_of,
    size_vector,
)
from ortflex_plugins.decompositions._real import real

DECOMPOSITIONS = Decompositions()

_LOWEST = -3.4028234e38


LAST = 2**31 - 1


def part(op: Ops, x: Tensor, start: Tensor | int, end: Tensor | int) -> Tensor:
    """Features ``start`` to ``end`` of the last axis."""
    first, last = (op.constant([v]) if isinstance(v, int) else v for v in (start, end))
    return op.Slice(x, first, last, axes=[-1])


def angles(op: Ops, cache: Tensor, positions: Tensor, length: Tensor) -> Tensor:
    """The rows of a cache for each position, [B or 1, 1, S, r/2].

    ``positions`` has the position of every token, [B, S], or of the first token, [1].
    """
    if positions.rank == 1:
        steps = count_to(op, length)
        positions = op.Unsqueeze(op.Cast(positions, to=TensorProto.INT64) + steps, axes=[0])
    return op.Unsqueeze(op.Gather(cache, positions), axes=[1])


def rotate(op: Ops, x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """``x`` [B, N, S, h] with its first r features rotated; the angles are [B or 1, 1, S, r/2]."""
    half = size_vector(op, cosines, -1)
    rotated = part(op, x, 0, half * 2)
    if interleaved:
        pairs = op.Reshape(rotated, [0, 0, 0, -1, 2])
        one, two = (op.Squeeze(part(op, pairs, k, k + 1), axes=[-1]) for k in (0, 1))
        new = [one * cosines - two * sines, two * cosines + one * sines]
        stacked = op.Concat(*(op.Unsqueeze(t, axes=[-1]) for t in new), axis=-1)
        y = op.Reshape(stacked, [0, 0, 0, -1])
    else:
        one, two = part(op, rotated, 0, half), part(op, rotated, half, LAST)
        y = op.Concat(one * cosines - two * sines, two * cosines + one * sines, axis=-1)
    width, angle = known_size(x, -1), known_size(cosines, -1)
    if width is not None and angle is not None and width == 2 * angle:
        return y
    return op.Concat(y, part(op, x, half * 2, LAST), axis=-1)


def _heads(op: Ops, x: Tensor, count: int) -> Tensor:
    """[B, S, N·h] as [B, N, S, h]."""
    return op.Transpose(op.Reshape(x, [0, 0, count, -1]), perm=[0, 2, 1, 3])


def _joined(op: Ops, x: Tensor) -> Tensor:
    """[B, N, S, h] as [B, S, N·h]."""
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, -1])


def _scaled(op: Ops, q: Tensor, scale: float) -> Tensor:
    """The queries times ``scale``, or, if ``scale`` is 0, divided by the root of the head size."""
    if scale:
        return q * scale
    size = known_size(q, -1)
    if size is not None:
        return q * (1 / math.sqrt(size))
    return q / op.Sqrt(op.Cast(size_of(op, q, -1), to=q.dtype))


def _steps(op: Ops, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The positions of queries, [S, 1], and of keys, [1, T]: the last query is the last key."""
    total, length = size_of(op, k, 2), size_of(op, q, 2)
    rows = op.Unsqueeze(op.Range(total - length, total, 1), axes=[1])
    return rows, op.Unsqueeze(count_to(op, total), axes=[0])


def _probabilities(op: Ops, scores: Tensor, sink: Tensor | None = None) -> Tensor:
    """Softmax over the keys; a sink, [N] or a scalar, is the score of an additional key without value."""
    if sink is None:
        return op.Softmax(scores, axis=-1)
    column = op.ReduceMax(scores, axes=[-1], keepdims=1) * 0.0
    column = column + (op.Reshape(sink, [1, -1, 1, 1]) if sink.rank else sink)
    return part(op, op.Softmax(op.Concat(scores, column, axis=-1), axis=-1), 0, -1)


def _masked(op: Ops, mask: Tensor, filled: float, batch: Tensor, total: Tensor) -> Tensor:
    """The summand of the scores: ``filled`` where a key is masked; it broadcasts to [B, N, S, T]."""
    if mask.rank == 1:
        columns = op.Unsqueeze(count_to(op, total), axes=[0])
        lengths = op.Cast(mask, to=TensorProto.INT64)
        first, second = op.Unsqueeze(batch, axes=[0]), op.Unsqueeze(batch * 2, axes=[0])
        ends = op.Slice(lengths, [0], first)
        keep = op.Less(columns, op.Unsqueeze(ends, axes=[1]))
        # The first positions are in the second half of the mask; without a second half they are 0.
        starts = op.Slice(op.Concat(lengths, lengths * 0, axis=0), first, second)
        keep = op.And(keep, op.Not(op.Less(columns, op.Unsqueeze(starts, axes=[1]))))
        axes = [1, 2]
    elif mask.rank in (2, 3):
        keep = op.Greater(op.Cast(mask, to=TensorProto.FLOAT), 0.0)
        axes = [1, 2] if mask.rank == 2 else [1]
    else:
        raise NotDecomposed(f"with a mask of rank {mask.rank}")
    added = op.Where(keep, op.constant(0.0), op.constant(filled))
    return op.Unsqueeze(added, axes=axes)


def _attend(
    op: Ops,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    added: Sequence[Tensor | None] = (),
    keep: Tensor | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """[B, S, N·h]: ``softmax(scale·q·kᵀ + added)·v`` over the keys of ``keep``."""
    scores = op.MatMul(_scaled(op, q, scale), op.Transpose(k, perm=[0, 1, 3, 2]))
    if softcap:
        scores = op.Tanh(scores / softcap) * softcap
    for bias in added:
        if bias is not None:
            scores = scores + op.Cast(bias, to=scores.dtype)
    if keep is not None:
        scores = op.Where(keep, scores, op.Cast(op.constant(_LOWEST), to=scores.dtype))
    return _joined(op, op.MatMul(_probabilities(op, scores, sink), v))


def _causal(op: Ops, node: Call, q: Tensor, k: Tensor) -> Tensor | None:
    if not node.setting("unidirectional", 0):
        return None
    rows, columns = _steps(op, q, k)
    return op.LessOrEqual(columns, rows)


def _split(op: Ops, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Parts of the last axis."""
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return [part(op, x, a, b) for a, b in itertools.pairwise(ends)]


def _hidden(node: Call, weights: Tensor) -> list[int]:
    sizes = list(node.setting("qkv_hidden_sizes", []))
    width = known_size(weights, -1)
    if not sizes and width is not None:
        sizes = [width // 3] * 3
    if not sizes:
        raise NotDecomposed("with weights of unknown size")
    return [int(s) for s in sizes]


@DECOMPOSITIONS.operator("Attention")
def attention(op: Ops, node: Call) -> Sequence[Tensor | None]:
    """Attention with one projection for queries, keys and values. Past keys and values are optional."""
    x, weights, bias = node.required(0), node.required(1), node.input(2)
    node.setting("rotary_embedding_dim", 0)
    made = op.MatMul(x, weights)
    made = made if bias is None else made + bias
    sizes = _hidden(node, weights)
    return _of_product(op, node, made, sizes, node.input(3), node.input(4), node.input(5))


@DECOMPOSITIONS.operator("QAttention")
def quantized_attention(op: Ops, node: Call) -> Sequence[Tensor | None]:
    """Attention with a quantized projection, whose weights are trained as float master weights."""
    weights = node.required(1)
    data = real(op, node, (0, 3, 6))
    made = op.MatMul(data, real(op, node, (1, 4, 7), axis=1)) + node.required(2)
    return _of_product(op, node, made, _hidden(node, weights), node.input(5), node.input(8), None)


def _of_product(
    op: Ops,
    node: Call,
    made: Tensor,
    sizes: Sequence[int],
    mask: Tensor | None,
    past: Tensor | None,
    bias: Tensor | None,
) -> Sequence[Tensor | None]:
    """Attention of queries, keys and values that are concatenated along the last axis."""
    count = node.setting("num_heads")
    if node.setting("do_rotary", 0):
        raise NotDecomposed("with do_rotary=1, which no CPU kernel computes")
    if node.setting("past_present_share_buffer", 0):
        raise NotDecomposed("with past_present_share_buffer=1")
    q, k, v = (_heads(op, t, count) for t in _split(op, made, sizes))
    k, v, present = _with_past(op, k, v, past, node.wants(1))
    y = _masked_attention(op, node, q, k, v, mask, bias)
    return [y, present]


def _masked_attention(
    op: Ops, node: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Attention with the mask, the bias, the scale and the causality of a node."""
    filled, added = node.setting("mask_filter_value", -10000.0), [bias]
    if mask is not None:
        added.insert(0, _masked(op, mask, filled, size_of(op, q, 0), size_of(op, k, 2)))
    keep = _causal(op, node, q, k)
    return _attend(op, q, k, v, scale=node.setting("scale", 0.0), added=added, keep=keep)


def _with_past(
    op: Ops, k: Tensor, v: Tensor, past: Tensor | None, wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values after those of the past, [2, B, N, P, h], and both together if they are wanted."""
    if past is not None:
        past_k, past_v = (op.Squeeze(op.Slice(past, [j], [j + 1], [0]), axes=[0]) for j in (0, 1))
        k, v = op.Concat(past_k, k, axis=2), op.Concat(past_v, v, axis=2)
    if not wanted:
        return k, v, None
    return k, v, op.Concat(op.Unsqueeze(k, axes=[0]), op.Unsqueeze(v, axes=[0]), axis=0)


@DECOMPOSITIONS.operator("MultiHeadAttention")
def multi_head_attention(op: Ops, node: Call) -> Sequence[Tensor | None]:
    """Attention of queries, keys and values, which are separate or packed by heads."""
    q, k, v = _operands(op, node, node.setting("num_heads"))
    past_k, past_v = node.input(6), node.input(7)
    k = k if past_k is None else op.Concat(past_k, k, axis=2)
    v = v if past_v is None else op.Concat(past_v, v, axis=2)
    return [_masked_attention(op, node, q, k, v, node.input(4), node.input(5)), k, v]


def _operands(op: Ops, node: Call, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as [B, N, S, h], with their bias."""
    query, key, value = node.required(0), node.input(1), node.input(2)
    bias = node.input(3)
    if query.rank == 5:  # [B, S, N, 3, h]
        if bias is not None:
            raise NotDecomposed("with a bias of packed queries, keys and values")
        q, k, v = _unpacked(op, query, 3)
        return q, k, v
    parts: list[Any] = [None] * 3
    if bias is not None:
        width, total = known_size(query, -1), known_size(bias, 0)
        if width is None or total is None:
            raise NotDecomposed("with a bias of unknown size")
        parts = _split(op, bias, [width, width, total - 2 * width])
    q = _heads(op, query if parts[0] is None else query + parts[0], count)
    if key is None:
        raise NotDecomposed("without keys")
    if key.rank == 5:  # [B, L, N, 2, h]
        if bias is not None:
            raise NotDecomposed("with a bias of packed keys and values")
        k, v = _unpacked(op, key, 2)
        return q, k, v
    if value is None:
        raise NotDecomposed("without values")
    out = []
    for x, added in ((key, parts[1]), (value, parts[2])):
        if x.rank == 4:  # [B, N, L, h] already
            out.append(x)
        else:
            out.append(_heads(op, x if added is None else x + added, count))
    return q, out[0], out[1]


def _unpacked(op: Ops, x: Tensor, parts: int) -> list[Tensor]:
    """[B, S, N, parts, h] as parts of [B, N, S, h]."""
    return [op.Transpose(op.Gather(x, j, axis=3), perm=[0, 2, 1, 3]) for j in range(parts)]


@DECOMPOSITIONS.operator("GroupQueryAttention")
def group_query_attention(op: Ops, node: Call) -> Sequence[Tensor | None]:
    """Causal attention in which several query heads share keys and values. A cache is not supported."""
    for index in (3, 4):
        past = node.input(index)
        if past is not None and (past.shape is None or past.shape[2] != 0):
            raise NotDecomposed("with past keys and values; export the model without a cache")
    for name in ("kv_cache_bit_width", "qk_output"):
        if node.setting(name, 0):
            raise NotDecomposed(f"with {name}")
    for name in ("k_quant_type", "v_quant_type"):
        if node.setting(name, "NONE") != "NONE":
            raise NotDecomposed(f"with {name}")
    node.required(6)  # the number of all keys; without a past, it is the number of queries
    count, groups = node.setting("num_heads"), node.setting("kv_num_heads")
    query, key, value = node.required(0), node.input(1), node.input(2)
    if key is None or value is None:
        width = known_size(query, -1)
        if width is None:
            raise NotDecomposed("with packed queries of unknown size")
        head = width // (count + 2 * groups)
        query, key, value = _split(op, query, [head * n for n in (count, groups, groups)])
    q, k, v = _heads(op, query, count), _heads(op, key, groups), _heads(op, value, groups)
    node.input(9)  # positions: without a past, the kernel ignores them and counts from 0
    interleaved = bool(node.setting("rotary_interleaved", 0))
    if node.setting("do_rotary", 0):
        length = size_of(op, q, 2)
        cosines, sines = (angles(op, node.required(i), op.constant([0]), length) for i in (7, 8))
        q, k = (rotate(op, t, cosines, sines, interleaved) for t in (q, k))
    else:
        node.input(7), node.input(8)
    rows, columns = _steps(op, q, k)
    keep = op.LessOrEqual(columns, rows)
    # The length of each row minus 1; later keys and queries of the row are padding.
    lengths = op.Reshape(op.Cast(node.required(5), to=TensorProto.INT64), [-1, 1, 1, 1])
    keep = op.And(keep, op.LessOrEqual(columns, lengths))
    window = node.setting("local_window_size", -1)
    if window > 0:
        keep = op.And(keep, op.Greater(columns, rows - window))
    sink = node.input(11)
    if sink is None and node.setting("smooth_softmax", 0) == 1:
        sink = op.constant(0.0, q.dtype)
    node.setting("smooth_softmax", 0)
    y = _attend(
        op,
        q,
        _repeated(op, k, count // groups),
        _repeated(op, v, count // groups),
        scale=node.setting("scale", 0.0),
        added=[node.input(10)],
        keep=keep,
        softcap=node.setting("softcap", 0.0),
        sink=sink,
    )
    return [y, k, v]


def _repeated(op: Ops, x: Tensor, times: int) -> Tensor:
    """Each head of [B, G, S, h] repeated ``times`` times."""
    if times == 1:
        return x
    copies = op.Concat(*([op.Unsqueeze(x, axes=[2])] * times), axis=2)
    batch, steps, width = (size_vector(op, x, axis) for axis in (0, 2, 3))
    return op.Reshape(copies, op.Concat(batch, op.constant([-1]), steps, width, axis=0))


@DECOMPOSITIONS.operator("RotaryEmbedding")
def rotary_embedding(op: Ops, node: Call) -> Sequence[Tensor]:
    """Rotary position embedding, which rotates feature pairs of a tensor [B, S, N·h] or [B, N, S, h]."""
    x, positions = node.required(0), node.required(1)
    cosines, sines = node.required(2), node.required(3)
    if node.setting("is_packed_batching", 0):
        raise NotDecomposed("with is_packed_batching=1")
    node.setting("scale", 1.0)
    width, count = node.setting("rotary_embedding_dim", 0), node.setting("num_heads", 0)
    interleaved = bool(node.setting("interleaved", 0))
    heads = x
    if x.rank == 3:
        if not count or not width:
            angle = known_size(cosines, -1)
            if angle is None:
                raise NotDecomposed("with a cache of angles of unknown size")
            heads = op.Transpose(op.Reshape(x, [0, 0, -1, 2 * angle]), perm=[0, 2, 1, 3])
        else:
            heads = _heads(op, x, count)
    length = size_of(op, heads, 2)
    rows = [angles(op, cache, positions, length) for cache in (cosines, sines)]
    y = rotate(op, heads, rows[0], rows[1], interleaved)
    return [_joined(op, y) if x.rank == 3 else y]


def _buckets(count: int, most: int) -> list[int]:
    """The bucket of each distance 0 … ``most``: near distances have their own, later ones logarithmic."""
    near = count // 2
    far = np.maximum(np.arange(most + 1, dtype=np.float32), 1) / np.float32(near)
    slope = np.float32(math.log(most / near))
    steps = np.log(far) / slope * np.float32(count - near)
    far_bucket = np.minimum(near + np.maximum(steps, 0).astype(np.int64), count - 1)
    return [d if d < near else int(far_bucket[d]) for d in range(most + 1)]


@DECOMPOSITIONS.operator("RelativePositionBias")
def relative_position_bias(op: Ops, node: Call) -> Sequence[Tensor]:
    """A bias [1, N, S, T] with a weight for each head and bucketed distance between query and key."""
    table = node.required(0)
    count, heads = table.shape or (None, None)
    if not isinstance(count, int) or not isinstance(heads, int):
        raise NotDecomposed("with a table of unknown size")
    most = int(node.setting("max_distance", 128))
    rows, columns = (count_to(op, op.Reshape(node.required(k), [])) for k in (1, 2))
    apart = op.Unsqueeze(columns, axes=[0]) - op.Unsqueeze(rows, axes=[1])
    if node.setting("is_bidirectional", 0):
        count_of_side = count // 2
        later = op.Where(apart > 0, op.constant(count_of_side), op.constant(0))
        distance = op.Abs(apart)
    else:
        count_of_side, later = count, op.constant(0)
        distance = op.Max(-apart, 0)
    of_distance = op.constant(_buckets(count_of_side, most))
    bucket = op.Gather(of_distance, op.Min(distance, most)) + later
    # The kernel reads the table by columns.
    by_head = op.Reshape(table, [heads, count])
    return [op.Unsqueeze(op.Gather(by_head, bucket, axis=1), axes=[0])]
