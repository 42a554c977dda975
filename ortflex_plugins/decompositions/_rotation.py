"""Rotary positions: pairs of features are rotated by angles that grow with the position.

Source: Su et al., arXiv:2104.09864.
"""

from __future__ import annotations

from onnx import TensorProto

from ortflex_core import Ops, Tensor, count_to, known_size, size_vector

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
