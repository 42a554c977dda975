"""Shared by convolutions and pooling: the positions of windows, and sums over windows.

Window o on an axis covers the places o·stride + κ·dilation − begin, κ = 0 … kernel − 1. Sizes that
are known while the graph is built become attributes; the others are computed when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import attrs
import numpy as np
import onnx

from ortflex_core.autodiff import NodeView, dims
from ortflex_core.errors import NoGradientRule
from ortflex_core.graph import Ops, Tensor
from ortflex_core.types import Array, Shape

Sizes = tuple[int, ...]
FLOAT = onnx.TensorProto.FLOAT
END = int(np.iinfo(np.int64).max)


def known(shape: Shape | None) -> Sizes | None:
    """The sizes, if all of them are numbers."""
    if shape is None or not all(isinstance(d, int) for d in shape):
        return None
    return tuple(int(d) for d in shape if d is not None)


@attrs.frozen
class Windows:
    """Windows over the places (``sizes``) of one tensor, ``counts`` of them on each axis.

    None stands for sizes that are known only when the graph runs.
    """

    kernel: Sizes | None
    strides: Sizes
    dilations: Sizes
    pads: tuple[tuple[int, int], ...] | None
    sizes: Sizes | None
    counts: Sizes | None
    lower: bool = False
    """Where padding is automatic and odd, the larger half comes first."""

    @property
    def axes(self) -> range:
        """The spatial axes."""
        return range(2, 2 + len(self.strides))

    @property
    def settings(self) -> dict[str, Any]:
        """Strides and dilations as attributes."""
        return {"strides": list(self.strides), "dilations": list(self.dilations)}

    @property
    def spans(self) -> Sizes | None:
        """The number of places from the first to the last of a window."""
        if self.kernel is None:
            return None
        pairs = zip(self.kernel, self.dilations, strict=True)
        return tuple(d * (k - 1) + 1 for k, d in pairs)

    @property
    def plain(self) -> bool:
        """Whether every window is one place and every place has one."""
        return (
            self.kernel is not None
            and {*self.kernel, *self.strides} == {1}
            and self.pads is not None
            and not any(map(any, self.pads))
        )

    @property
    def tiles(self) -> bool:
        """Whether the windows, lying side by side, cover every place once."""
        if self.kernel is None or self.sizes is None or self.counts is None or self.pads is None:
            return False
        whole = tuple(k * o for k, o in zip(self.kernel, self.counts, strict=True))
        dense = self.kernel == self.strides and (set(self.dilations) == {1} or self.plain)
        return dense and whole == self.sizes and not any(b for b, _ in self.pads)

    @property
    def overlap(self) -> bool:
        """Whether a place can belong to several windows."""
        spans = self.spans
        return spans is None or any(e > s for e, s in zip(spans, self.strides, strict=True))


def windows(node: NodeView, places: Tensor, out: Tensor, kernel: Sizes | None) -> Windows:
    """The windows of a convolution or pooling node over ``places``, one for each of ``out``."""
    rank = places.rank or out.rank
    if kernel is None and rank is None:
        raise NoGradientRule("on a tensor of unknown rank")
    n = len(kernel) if kernel is not None else int(rank or 0) - 2
    ones = [1] * n
    result = Windows(
        kernel,
        tuple(node.strides or ones),
        tuple(node.dilations or ones),
        None,
        None if places.shape is None else known(places.shape[2:]),
        None if out.shape is None else known(out.shape[2:]),
        node.auto_pad == "SAME_LOWER",
    )
    return attrs.evolve(result, pads=_pads(node, result, n))


def _pads(node: NodeView, found: Windows, n: int) -> tuple[tuple[int, int], ...] | None:
    if node.auto_pad in (None, "NOTSET"):
        pads = node.pads or [0] * (2 * n)
        return tuple(zip(pads[:n], pads[n:], strict=True))
    if node.auto_pad == "VALID":
        return ((0, 0),) * n
    if found.spans is None:
        raise NoGradientRule(f"with auto_pad={node.auto_pad} and a kernel of unknown size")
    if found.sizes is None:
        if set(found.strides) != {1}:
            return None
        totals = [span - 1 for span in found.spans]
    else:
        rows = zip(found.sizes, found.strides, found.spans, strict=True)
        totals = [max((-(-size // s) - 1) * s + span - size, 0) for size, s, span in rows]
    return tuple(halves(total, found.lower) for total in totals)


def halves(total: int, lower: bool) -> tuple[int, int]:
    """An amount of padding in two, the larger part last unless ``lower``."""
    small = total // 2
    return (total - small, small) if lower else (small, total - small)


def padded(op: Ops, x: Tensor, out: Tensor, at: Windows) -> Tensor:
    """``x`` with the padding of its windows, as zeros."""
    if at.pads is None:
        first, last = _run_time_pads(op, x, out, at)
        return op.Pad(x, op.Concat(op.constant([0, 0]), first, op.constant([0, 0]), last, axis=0))
    if not any(map(any, at.pads)):
        return x
    first_, last_ = ([pad[side] for pad in at.pads] for side in (0, 1))
    return op.Pad(x, op.constant([0, 0, *first_, 0, 0, *last_]))


def _run_time_pads(op: Ops, x: Tensor, out: Tensor, at: Windows) -> tuple[Tensor, Tensor]:
    assert at.spans is not None
    covered = (places(op, out) - 1) * op.constant(list(at.strides)) + op.constant(list(at.spans))
    total = op.Max(covered - places(op, x), 0)
    small = total / 2
    return (total - small, small) if at.lower else (small, total - small)


def places(op: Ops, x: Tensor) -> Tensor:
    """The spatial sizes of a tensor."""
    return op.Slice(dims(op, x), [2], [END])


def spread(op: Ops, g: Tensor, weight: Tensor, at: Windows, x: Tensor, group: int = 1) -> Tensor:
    """The adjoint of a correlation: every window of ``g`` is added to its places in ``x``."""
    settings = {**at.settings, "group": group}
    if at.pads is not None and at.sizes is not None and at.counts is not None and at.spans:
        rows = zip(at.strides, at.counts, at.spans, at.pads, at.sizes, strict=True)
        ends = [s * (o - 1) + span - pad[0] - size for s, o, span, pad, size in rows]
        pads = [*(pad[0] for pad in at.pads), *(max(e, 0) for e in ends)]
        excess = [max(-e, 0) for e in ends]
        return _transposed(op, g, weight, pads, excess, settings)
    if at.pads is not None and set(at.strides) == {1}:
        pads = [pad[side] for side in (0, 1) for pad in at.pads]
        return _transposed(op, g, weight, pads, [], settings)
    whole = op.ConvTranspose(g, weight, **settings)
    if at.pads is None:
        # ``g`` has a place for each window, like the output that the padding was made for.
        first, _ = _run_time_pads(op, x, g, at)
    else:
        first = op.constant([pad[0] for pad in at.pads])
    last = places(op, x) - places(op, whole) + first
    zero = op.constant([0, 0])
    return op.Pad(whole, op.Concat(zero, op.Neg(first), zero, last, axis=0))


def _transposed(
    op: Ops, g: Tensor, weight: Tensor, pads: list[int], more: list[int], settings: dict[str, Any]
) -> Tensor:
    if any(pads):
        settings["pads"] = pads
    if any(more):
        settings["output_padding"] = more
    return op.ConvTranspose(g, weight, **settings)


def slices(op: Ops, x: Tensor, at: Windows) -> Iterator[Tensor]:
    """For each element κ of the kernel, row by row, the values of all windows there.

    ``x`` has its padding already.
    """
    if at.plain:
        yield x
        return
    assert at.kernel is not None
    assert at.spans is not None
    n = len(at.kernel)
    for place in product(*map(range, at.kernel)):
        starts = [k * d for k, d in zip(place, at.dilations, strict=True)]
        if at.counts is not None:
            rows = zip(starts, at.strides, at.counts, strict=True)
            ends = [first + s * (o - 1) + 1 for first, s, o in rows]
        else:
            ends = [
                -(span - 1 - first) or END for first, span in zip(starts, at.spans, strict=True)
            ]
        steps = None if set(at.strides) == {1} else list(at.strides)
        yield op("Slice", x, starts, ends, list(range(2, 2 + n)), steps)


def shares(op: Ops, at: Windows, x: Tensor, out: Tensor) -> Array | Tensor:
    """How many places of ``x``, padding not counted, lie in each window; at least 1."""
    assert at.kernel is not None
    if at.sizes is not None and at.counts is not None and at.pads is not None:
        total: Array = np.ones(())
        for axis in range(len(at.kernel)):
            first = np.arange(at.counts[axis]) * at.strides[axis] - at.pads[axis][0]
            at_ = first[:, None] + np.arange(at.kernel[axis]) * at.dilations[axis]
            inside = ((at_ >= 0) & (at_ < at.sizes[axis])).sum(axis=1)
            total = total[..., None] * inside
        return np.maximum(total, 1)
    if at.pads is None:
        begins = _run_time_pads(op, x, out, at)[0]
    else:
        begins = op.constant([pad[0] for pad in at.pads])
    have, want = places(op, x), places(op, out)
    product_: Tensor | None = None
    for axis, k in enumerate(at.kernel):
        size, count, begin = (_item(op, v, axis) for v in (have, want, begins))
        first_ = op.Range(op.constant(0), count, op.constant(1)) * at.strides[axis] - begin
        offsets = op.constant([j * at.dilations[axis] for j in range(k)])
        where = op.Unsqueeze(first_, axes=[1]) + offsets
        inside = op.Cast(op.And(op.GreaterOrEqual(where, 0), where < size), to=x.dtype)
        number = op.ReduceSum(inside, axes=[1], keepdims=0)
        if later := list(range(1, len(at.kernel) - axis)):
            number = op.Unsqueeze(number, axes=later)
        product_ = number if product_ is None else product_ * number
    assert product_ is not None
    return op.Max(product_, 1.0)


def _item(op: Ops, values: Tensor, k: int) -> Tensor:
    return op.Gather(values, op.constant(k))


def flat(shape: Sequence[int]) -> int:
    """The number of elements of a shape."""
    return int(np.prod(np.asarray(shape, np.int64)))
