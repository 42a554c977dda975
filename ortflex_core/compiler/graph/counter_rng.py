"""Random numbers in standard integer operators: a function of (seed, name, step), without a state.

A counter-based generator has no state to save: step 1000 draws the same mask in an uninterrupted
run, after a resume, and with several steps in one graph. The generator is Widynski's "squares" with
five rounds. onnxruntime multiplies and adds int64 (which wraps) and shifts uint64, so values change
type between the two.

Source: Widynski, "Squares: a fast counter-based RNG" (2020), arXiv:2004.06278.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from onnx import TensorProto

from ortflex_core.compiler.graph.ops import Ops, Tensor
from ortflex_core.compiler.graph.sizes import count_to
from ortflex_core.kernel.host_scalars import Host

_INT64, _UINT64 = TensorProto.INT64, TensorProto.UINT64
_HALF = np.array(32, np.uint64)
_END = np.iinfo(np.int64).max


def dropout(
    op: Ops, x: Tensor, ratio: float | Tensor, step: Tensor, *, seed: int, node: str
) -> tuple[Tensor, Tensor]:
    """Return x · mask / (1 − ratio) and the mask, whose elements are true with 1 − ratio.

    Args:
        op: the operators of the graph.
        x: any shape.
        ratio: the fraction that is dropped, from 0 to below 1; a number or a scalar of the graph.
        step: int64 scalar; every step has a different mask.
        seed: of the training.
        node: its name; every node has different masks.
    """
    mask = op.Less(_draw_uniform(op, x, step, f"{seed}/{node}"), _threshold(op, ratio))
    if isinstance(ratio, Tensor):
        scale = op.Reciprocal(1 - op.Cast(ratio, to=x.dtype))
    else:
        scale = op.constant(1 / (1 - ratio), x.dtype)
    return x * op.Where(mask, scale, 0.0), mask


def normal(op: Ops, like: Tensor, step: Host, *, seed: int, name: str) -> Tensor:
    """Return independent numbers of the standard normal distribution, of the type and shape of ``like``.

    z = sqrt(−2·ln u₁)·sin(2π·u₂), computed in float64 from the two halves of one word per element,
    so that after rounding to float32 the bits are the same on every device. Every z is between −6.8
    and 6.8.

    Args:
        op: the operators of the graph.
        like: any float tensor.
        step: a host scalar, an integer from 0 to 2³¹; every step has different numbers.
        seed: of the training.
        name: every name has different numbers.

    Source: Box and Muller, "A note on the generation of random normal deviates" (1958).
    """
    start = like.trace.bind(step, _INT64) * op.constant(2**32)
    words = _squares(op, start + count_to(op, op.Size(like)), _key(f"normal/{seed}/{name}"))
    high, low = (_to_fraction(op, part) for part in (words, words * op.constant(2**32)))
    values = op.Sqrt(op.Log(high) * -2.0) * op.Sin(low * (2 * math.pi))
    out: Tensor = op.Cast(op.Reshape(values, op.Shape(like)), to=like.dtype)
    out.shape = like.shape
    return out


def _to_fraction(op: Ops, words: Tensor) -> Tensor:
    """The upper halves of words as float64 between 0 and 1, both excluded."""
    word = op.Cast(words, to=_UINT64)
    half = op.Cast(op.BitShift(word, op.constant(_HALF), direction="RIGHT"), to=_INT64)
    return (op.Cast(half, to=TensorProto.DOUBLE) + 0.5) * 2.0**-32


def _threshold(op: Ops, ratio: float | Tensor) -> Tensor:
    """The int64 below which a fraction 1 − ratio of all int64 lies."""
    if isinstance(ratio, Tensor):
        exact = (0.5 - op.Cast(ratio, to=TensorProto.DOUBLE)) * 2.0**64
        # The largest float64 below 2⁶³.
        return op.Cast(op.Min(exact, 2.0**63 - 1024), to=_INT64)
    return op.constant(np.int64(min(int((0.5 - ratio) * 2**64), 2**63 - 1)))


def _draw_uniform(op: Ops, x: Tensor, step: Tensor, label: str) -> Tensor:
    """A uniformly distributed int64 for every element of ``x``.

    Each column and each row (all axes but the last) has a random word, each element the product of
    two. For a given row the products are as independent as the words of the columns, and vice
    versa; only this one multiplication and the comparison work on the whole tensor.
    """
    start, key = step * op.constant(2**32), _key(label)
    if x.rank is None or x.rank < 2:
        words = _squares(op, start + count_to(op, op.Size(x)), key)
        whole: Tensor = op.Reshape(words, op.Shape(x))
        whole.shape = x.shape
        return whole
    assert x.shape is not None
    known = [d if isinstance(d, int) else -1 for d in x.shape]
    *rows, columns = known
    front = op.Slice(op.Shape(x), [0], [-1])
    height = op.ReduceProd(front, keepdims=0) if -1 in rows else op.constant(math.prod(rows))
    many = rows.count(-1) > 1
    shape = op.Concat(front, op.constant([1]), axis=0) if many else op.constant([*rows, 1])
    width = op.constant(columns)
    if columns == -1:
        width = op.Squeeze(op.Slice(op.Shape(x), [-1], [_END]), axes=[0])
    size = op.constant(math.prod(rows) + columns) if -1 not in known else height + width
    # Columns first, so that the first rows of a longer batch have the same words.
    words = _squares(op, start + count_to(op, size), key)
    border = op.constant([columns]) if columns != -1 else op.Reshape(width, [1])
    by_column, by_row = op.Slice(words, [0], border), op.Slice(words, border, [_END])
    product: Tensor = op.Reshape(by_row, shape) * by_column
    product.shape = x.shape
    return product


def _key(label: str) -> int:
    """An odd 64-bit key with irregular digits, as the generator requires."""
    digest = hashlib.sha256(label.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) | 1


def _squares(op: Ops, counter: Tensor, key: int) -> Tensor:
    """64 random bits for every counter; the published ⊕ of the last round is + here."""
    y = counter * op.constant(np.int64(key))
    z = y + op.constant(np.int64(key))
    x = _swap_halves(op, y * y + y)
    x = _swap_halves(op, x * x + z)
    x = _swap_halves(op, x * x + y)
    t = x * x + z
    x = _swap_halves(op, t)
    last = op.BitShift(op.Cast(x * x + y, to=_UINT64), op.constant(_HALF), direction="RIGHT")
    return t + op.Cast(last, to=_INT64)


def _swap_halves(op: Ops, x: Tensor) -> Tensor:
    """A word with its two halves exchanged."""
    word = op.Cast(x, to=_UINT64)
    halves = [op.BitShift(word, op.constant(_HALF), direction=d) for d in ("LEFT", "RIGHT")]
    return op.Cast(halves[0], to=_INT64) + op.Cast(halves[1], to=_INT64)
