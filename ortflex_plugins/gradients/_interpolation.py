"""Interpolation of an image between its points, and its adjoint.

The value at a point is a weighted sum over its neighbors, the taps. Each neighbor gets the cotangent
times the same weight; ScatterElements adds them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import attrs
import onnx

from ortflex_core import Ops, Tensor, add_at, size_vector, zeros_like

INT64 = onnx.TensorProto.INT64
T = TypeVar("T", Tensor, Tensor | float)


@attrs.frozen
class Tap:
    """A neighbor along one axis: its place, its weight, and the slope of the weight (None means 0)."""

    place: Tensor
    weight: Tensor | float
    slope: Tensor | float | None


@attrs.frozen
class Samples:
    """L points in each of M images, which are [M, C, places].

    ``taps`` are the neighbors along each spatial axis, ``sizes`` the sizes of these axes.
    """

    image: Tensor
    taps: Sequence[Sequence[Tap]]
    sizes: Sequence[Tensor]

    @property
    def read(self) -> list[tuple[Tap, ...]]:
        """The combinations of neighbors along the axes; each is read once."""
        return list(product(*self.taps))

    def places(self, op: Ops) -> Tensor:
        """The indices of the combinations in the flattened image: [M, combinations · L]."""
        return joined(op, [_flat_place(op, taps, self.sizes) for taps in self.read])

    def neighbors(self, op: Ops) -> Tensor:
        """The values of the image at the combinations, [M, C, combinations · L]."""
        one = op.constant([1])
        channels = op.Concat(one, size_vector(op, self.image, 1), one, axis=0)
        index = op.Expand(op.Unsqueeze(self.places(op), axes=[1]), channels)
        return op.GatherElements(self.image, index, axis=2)

    def values(self, op: Ops) -> Tensor:
        """The samples, [M, C, L]."""
        weights = joined(op, [times(t.weight for t in taps) for taps in self.read])
        shares = op.Unsqueeze(weights, axes=[1])
        terms = op.Reshape(self.neighbors(op) * shares, [0, 0, len(self.read), -1])
        return op.ReduceSum(terms, axes=[2], keepdims=0)

    def to_image(self, op: Ops, g: Tensor) -> Tensor:
        """The cotangent of the image from the cotangent of the samples [M, C, L]."""
        weights = [times(t.weight for t in taps) for taps in self.read]
        parts = joined(op, [g if w == 1 else g * _over_channels(op, w) for w in weights])
        index = op.Expand(op.Unsqueeze(self.places(op), axes=[1]), op.Shape(parts))
        return add_at(op, zeros_like(op, self.image), index, parts)

    def to_points(self, op: Ops, g: Tensor) -> list[Tensor]:
        """For each axis the cotangent [M, L] of the positions of the samples."""
        every = op.Concat(*[g] * len(self.read), axis=2)
        pull = op.ReduceSum(self.neighbors(op) * every, axes=[1], keepdims=0)
        out = []
        for axis in range(len(self.taps)):
            slopes = [
                times(t.slope if k == axis else t.weight for k, t in enumerate(taps))
                for taps in self.read
            ]
            terms = op.Reshape(pull * joined(op, slopes), [0, len(self.read), -1])
            out.append(op.ReduceSum(terms, axes=[1], keepdims=0))
        return out


def linear_taps(op: Ops, point: Tensor) -> list[Tap]:
    """The two neighbors of a point, which may be outside of the image."""
    first, distance = below(op, point)
    one = op.constant(1.0, point.dtype)
    return [Tap(first, 1 - distance, -one), Tap(first + 1, distance, one)]


def below(op: Ops, point: Tensor) -> tuple[Tensor, Tensor]:
    """The largest integer that is not above a point, and the distance of the point from it."""
    floor = op.Floor(point)
    return op.Cast(floor, to=INT64), point - floor


def zeros_outside(op: Ops, tap: Tap, size: Tensor, dtype: int) -> Tap:
    """The tap with the weight 0 if it is outside of the image."""
    inside = clamped(op, tap.place, size)
    kept = op.Cast(op.Equal(tap.place, inside), to=dtype)
    return Tap(inside, kept * tap.weight, None if tap.slope is None else kept * tap.slope)


def clamped(op: Ops, place: Tensor, size: Tensor) -> Tensor:
    """The place of an axis that is nearest to ``place``."""
    return op.Max(op.Min(place, size - 1), 0)


def times(factors: Iterable[Any]) -> Tensor | float:
    """The product of weights."""
    product: Tensor | float = functools.reduce(operator.mul, factors)
    return product


def joined(op: Ops, parts: Sequence[T]) -> T | Tensor:
    """The parts concatenated along the last axis; a number can only be a single part."""
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=-1)


def _flat_place(op: Ops, taps: Sequence[Tap], sizes: Sequence[Tensor]) -> Tensor:
    place = taps[0].place
    for tap, size in zip(taps[1:], sizes[1:], strict=True):
        place = place * size + tap.place
    return place


def _over_channels(op: Ops, weight: Tensor | float) -> Tensor | float:
    return op.Unsqueeze(weight, axes=[1]) if isinstance(weight, Tensor) else weight
