"""Interpolation of an image between its points, and its adjoint.

A point is read as a weighted sum over its neighbours, the taps; each neighbour gets the cotangent
times the same weight, summed by ScatterElements.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import attrs
import onnx

from ortflex_core.autodiff import zeros_like
from ortflex_core.graph import Ops, Tensor

INT64 = onnx.TensorProto.INT64
T = TypeVar("T", Tensor, Tensor | float)


@attrs.frozen
class Tap:
    """One neighbour along one axis: its place, its weight, and the weight's slope (None: 0)."""

    place: Tensor
    weight: Tensor | float
    slope: Tensor | float | None


@attrs.frozen
class Samples:
    """Points of an image [M, C, places], L of them in each of the M.

    ``taps`` are the neighbours along each spatial axis, ``sizes`` the sizes of these axes.
    """

    image: Tensor
    taps: Sequence[Sequence[Tap]]
    sizes: Sequence[Tensor]

    @property
    def read(self) -> list[tuple[Tap, ...]]:
        """The combinations of neighbours, each of which is read once."""
        return list(product(*self.taps))

    def places(self, op: Ops) -> Tensor:
        """Their indices in the flattened image: [M, combinations · L]."""
        return joined(op, [_flat_place(op, taps, self.sizes) for taps in self.read])

    def neighbours(self, op: Ops) -> Tensor:
        """The values there, [M, C, combinations · L]."""
        channels = op.Unsqueeze(size_of(op, self.image, 1), axes=[0])
        each = op.Concat(op.constant([1]), channels, op.constant([1]), axis=0)
        index = op.Expand(op.Unsqueeze(self.places(op), axes=[1]), each)
        return op.GatherElements(self.image, index, axis=2)

    def values(self, op: Ops) -> Tensor:
        """The samples, [M, C, L]."""
        weights = joined(op, [times(t.weight for t in taps) for taps in self.read])
        shares = op.Unsqueeze(weights, axes=[1])
        apart = op.Reshape(self.neighbours(op) * shares, op.constant([0, 0, len(self.read), -1]))
        return op.ReduceSum(apart, axes=[2], keepdims=0)

    def to_image(self, op: Ops, g: Tensor) -> Tensor:
        """The image's cotangent from that of the samples [M, C, L]."""
        weights = [times(t.weight for t in taps) for taps in self.read]
        parts = joined(op, [g if w == 1 else g * _over_channels(op, w) for w in weights])
        index = op.Expand(op.Unsqueeze(self.places(op), axes=[1]), op.Shape(parts))
        zeros = zeros_like(op, self.image)
        return op.ScatterElements(zeros, index, parts, axis=2, reduction="add")

    def to_points(self, op: Ops, g: Tensor) -> list[Tensor]:
        """For each axis the cotangent [M, L] of the positions of the samples."""
        every = op.Concat(*[g] * len(self.read), axis=2)
        pull = op.ReduceSum(self.neighbours(op) * every, axes=[1], keepdims=0)
        out = []
        for axis in range(len(self.taps)):
            slopes = [
                times(t.slope if k == axis else t.weight for k, t in enumerate(taps))
                for taps in self.read
            ]
            apart = op.Reshape(pull * joined(op, slopes), op.constant([0, len(self.read), -1]))
            out.append(op.ReduceSum(apart, axes=[1], keepdims=0))
        return out


def size_of(op: Ops, x: Tensor, axis: int) -> Tensor:
    """The size of an axis as a rank-0 int64, constant where it is known."""
    size = None if x.shape is None else x.shape[axis]
    return op.constant(size) if isinstance(size, int) else op.Gather(op.Shape(x), op.constant(axis))


def linear_taps(op: Ops, point: Tensor) -> list[Tap]:
    """The two neighbours of a point, which may lie outside."""
    below = op.Floor(point)
    rest, first = point - below, op.Cast(below, to=INT64)
    one = op.constant(1.0, point.dtype)
    return [Tap(first, 1 - rest, -one), Tap(first + 1, rest, one)]


def zeros_outside(op: Ops, tap: Tap, size: Tensor, dtype: int) -> Tap:
    """A tap that reads 0 outside of the image."""
    inside = op.Max(op.Min(tap.place, size - 1), 0)
    kept = op.Cast(op.Equal(tap.place, inside), to=dtype)
    return Tap(inside, kept * tap.weight, None if tap.slope is None else kept * tap.slope)


def times(factors: Iterable[Any]) -> Tensor | float:
    """The product of weights."""
    product: Tensor | float = functools.reduce(operator.mul, factors)
    return product


def joined(op: Ops, parts: Sequence[T]) -> T | Tensor:
    """Concatenated along the last axis; only the weight of a single tap is a number."""
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=-1)


def _flat_place(op: Ops, taps: Sequence[Tap], sizes: Sequence[Tensor]) -> Tensor:
    place = taps[0].place
    for tap, size in zip(taps[1:], sizes[1:], strict=True):
        place = place * size + tap.place
    return place


def _over_channels(op: Ops, weight: Tensor | float) -> Tensor | float:
    return op.Unsqueeze(weight, axes=[1]) if isinstance(weight, Tensor) else weight
