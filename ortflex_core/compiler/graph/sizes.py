"""Sizes of tensors while a graph is built: numbers where they are known, else tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from onnx import TensorProto

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor
    from ortflex_core.kernel.types import TensorSpec


UNKNOWN = 64
"""The assumed number of rows, and of any other unknown size of an input, in estimates of memory."""


def known_sizes(x: Tensor, first: int = 0, last: int | None = None) -> tuple[int, ...] | None:
    """The sizes of the axes from ``first`` to before ``last``; None if one of them is not known.

    >>> from ortflex_core import Trace
    >>> x = Trace({"": 17}).input("x", "f4", ("N", 3, 8, 8))
    >>> known_sizes(x, 2), known_sizes(x)
    ((8, 8), None)
    """
    if x.shape is None:
        return None
    sizes = x.shape[first:last]
    known = tuple(d for d in sizes if isinstance(d, int))
    return known if len(known) == len(sizes) else None


def known_size(x: Tensor, axis: int) -> int | None:
    """The size of an axis; None if it is not known, or if there is no such axis."""
    if x.shape is None or not -len(x.shape) <= axis < len(x.shape):
        return None
    size = x.shape[axis]
    return size if isinstance(size, int) else None


def size_of(op: Ops, x: Tensor, axis: int) -> Tensor:
    """The size of an axis as an int64 scalar, constant if it is known."""
    size = known_size(x, axis)
    return op.Gather(op.Shape(x), axis, axis=0) if size is None else op.constant(size)


def size_vector(op: Ops, x: Tensor, axis: int) -> Tensor:
    """The size of an axis as an int64 tensor [1], constant if it is known."""
    size = known_size(x, axis)
    return op.Gather(op.Shape(x), [axis], axis=0) if size is None else op.constant([size])


def dims(op: Ops, like: Tensor) -> Tensor:
    """The shape of a tensor as an int64 tensor, constant if it is known."""
    sizes = known_sizes(like)
    return op.Shape(like) if sizes is None else op.constant(sizes, TensorProto.INT64)


def count_to(op: Ops, size: Tensor) -> Tensor:
    """The numbers 0, 1, …, size − 1 for an int64 scalar."""
    return op.Range(0, size, 1)


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor of this type and shape; an unknown size counts as UNKNOWN.

    Sizes whose names inference generated may be anything, and count as one.
    """
    sizes = [
        d if isinstance(d, int) else 1 if d is None or d.startswith("unk__") else UNKNOWN
        for d in spec.shape or ()
    ]
    try:
        return math.prod(sizes) * (8 if spec.dtype == TensorProto.STRING else spec.numpy.itemsize)
    except (KeyError, TypeError, ValueError):
        return 0
