"""Rotary positions: pairs of features turned by angles that grow with the position.

Source: Su et al., arXiv:2104.09864.
"""

from __future__ import annotations

from onnx import TensorProto

from ortflex_core.graph import Ops, Tensor

LAST = 2**31 - 1


def part(op: Ops, x: Tensor, start: Tensor | int, end: Tensor | int) -> Tensor:
    """Features ``start`` to ``end`` of the last axis."""
    ends = [op.constant([v]) if isinstance(v, int) else v for v in (start, end)]
    return op.Slice(x, ends[0], ends[1], axes=[-1])


def angles(op: Ops, cache: Tensor, positions: Tensor, length: Tensor) -> Tensor:
    """The rows of a cache for each position, [B or 1, 1, S, r/2].

    ``positions`` has the position of every token, [B, S], or that of the first one, [1].
    """
    if positions.rank == 1:
        row = op.Range(op.constant(0), length, op.constant(1))
        positions = op.Unsqueeze(op.Cast(positions, to=TensorProto.INT64) + row, axes=[0])
    return op.Unsqueeze(op.Gather(cache, positions), axes=[1])


def rotate(op: Ops, x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """``x`` [B, N, S, h] with its first r features rotated, r/2 being the width of the angles."""
    half = op.Shape(cosines, start=-1) if op.opset >= 15 else _last(op, cosines)
    turned = part(op, x, 0, half * 2)
    rest = part(op, x, half * 2, LAST)
    if interleaved:
        pairs = op.Reshape(turned, op.constant([0, 0, 0, -1, 2]))
        one, two = (op.Squeeze(part(op, pairs, k, k + 1), axes=[-1]) for k in (0, 1))
        new = [one * cosines - two * sines, two * cosines + one * sines]
        stacked = op.Concat(*(op.Unsqueeze(t, axes=[-1]) for t in new), axis=-1)
        y = op.Reshape(stacked, op.constant([0, 0, 0, -1]))
    else:
        one, two = part(op, turned, 0, half), part(op, turned, half, LAST)
        y = op.Concat(one * cosines - two * sines, two * cosines + one * sines, axis=-1)
    width, angle = (x.shape or (None,))[-1], (cosines.shape or (None,))[-1]
    if isinstance(width, int) and isinstance(angle, int) and width == 2 * angle:
        return y
    return op.Concat(y, rest, axis=-1)


def _last(op: Ops, x: Tensor) -> Tensor:
    return op.Gather(op.Shape(x), op.constant([-1]))
