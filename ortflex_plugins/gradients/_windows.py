"""Windows of convolutions and pooling: their positions, and sums over windows.

Window o on an axis covers the places o·stride + κ·dilation − begin, κ = 0 … kernel − 1. Sizes that
are known while the graph is built become attributes; the others are computed when it runs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import attrs
import numpy as np
import onnx

from ortflex_core import Array, NodeView, NoGradientRule, Ops, Tensor, count_to, known_sizes

Sizes = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]
FLOAT = onnx.TensorProto.FLOAT
END = int(np.iinfo(np.int64).max)


@attrs.frozen(kw_only=True)
class Windows:
    """Windows over the places of one tensor.

    ``sizes`` are the numbers of places along the axes, ``counts`` the numbers of windows. None stands
    for sizes that are known only when the graph runs.
    """

    kernel: Sizes | None
    strides: Sizes
    dilations: Sizes
    pads: Pads | None = None
    sizes: Sizes | None
    counts: Sizes | None
    lower: bool = False
    """Whether the larger half of an automatic padding of odd size comes first."""

    @property
    def fixed(self) -> FixedWindows | None:
        """These windows if everything about them is known, else None."""
        if None in (self.kernel, self.pads, self.sizes, self.counts):
            return None
        return FixedWindows(**attrs.asdict(self, recurse=False))

    @property
    def axes(self) -> range:
        """The spatial axes."""
        return range(2, 2 + len(self.strides))

    @property
    def settings(self) -> dict[str, Any]:
        """Strides and dilations as attributes."""
        return {"strides": list(self.strides), "dilations": list(self.dilations)}

    @property
    def padding(self) -> list[int] | None:
        """The padding as an attribute; None if there is no padding, or if it is not known."""
        return _unless_zero([pad[side] for side in (0, 1) for pad in self.pads or ()])

    @property
    def spans(self) -> Sizes | None:
        """The number of places from the first to the last of a window."""
        return None if self.kernel is None else _spans(self.kernel, self.dilations)

    @property
    def plain(self) -> bool:
        """Whether every window is one place and every place has one window."""
        dense = self.kernel is not None and {*self.kernel, *self.strides} == {1}
        return dense and self.pads is not None and self.padding is None

    @property
    def overlap(self) -> bool:
        """Whether a place can belong to several windows."""
        spans = self.spans
        return spans is None or any(e > s for e, s in zip(spans, self.strides, strict=True))


@attrs.frozen(kw_only=True)
class FixedWindows(Windows):
    """Windows about which everything is known while the graph is built."""

    kernel: Sizes
    pads: Pads
    sizes: Sizes
    counts: Sizes

    @property
    def spans(self) -> Sizes:
        """The number of places from the first to the last of a window."""
        return _spans(self.kernel, self.dilations)

    @property
    def tiles(self) -> bool:
        """Whether the windows cover every place once, without gaps and overlaps."""
        covered = tuple(k * o for k, o in zip(self.kernel, self.counts, strict=True))
        dense = self.kernel == self.strides and (set(self.dilations) == {1} or self.plain)
        return dense and covered == self.sizes and not any(first for first, _ in self.pads)


def _spans(kernel: Sizes, dilations: Sizes) -> Sizes:
    return tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True))


def _unless_zero(numbers: list[int]) -> list[int] | None:
    return numbers if any(numbers) else None


def windows(node: NodeView, places: Tensor, out: Tensor, kernel: Sizes | None) -> Windows:
    """The windows of a convolution or pooling node over ``places``, one for each place of ``out``."""
    rank = places.rank or out.rank
    if kernel is None and rank is None:
        raise NoGradientRule("on a tensor of unknown rank")
    n = len(kernel) if kernel is not None else int(rank or 0) - 2
    ones = [1] * n
    result = Windows(
        kernel=kernel,
        strides=tuple(node.strides or ones),
        dilations=tuple(node.dilations or ones),
        sizes=known_sizes(places, 2),
        counts=known_sizes(out, 2),
        lower=node.auto_pad == "SAME_LOWER",
    )
    return attrs.evolve(result, pads=_pads(node, result, n))


def _pads(node: NodeView, unpadded: Windows, n: int) -> Pads | None:
    """The padding of each axis; None if it is known only when the graph runs."""
    if node.auto_pad in (None, "NOTSET"):
        pads = node.pads or [0] * (2 * n)
        return tuple(zip(pads[:n], pads[n:], strict=True))
    if node.auto_pad == "VALID":
        return ((0, 0),) * n
    if unpadded.spans is None:
        raise NoGradientRule(f"with auto_pad={node.auto_pad} and a kernel of unknown size")
    if unpadded.sizes is None:
        if set(unpadded.strides) != {1}:
            return None
        totals = [span - 1 for span in unpadded.spans]
    else:
        rows = zip(unpadded.sizes, unpadded.strides, unpadded.spans, strict=True)
        totals = [max((-(-size // s) - 1) * s + span - size, 0) for size, s, span in rows]
    return tuple(halves(total, unpadded.lower) for total in totals)


def halves(total: int, lower: bool) -> tuple[int, int]:
    """An amount of padding in two parts; the larger part comes last unless ``lower``."""
    small = total // 2
    return (total - small, small) if lower else (small, total - small)


def padded(op: Ops, x: Tensor, out: Tensor, at: Windows) -> Tensor:
    """``x`` with the padding of its windows, as zeros."""
    if at.pads is None:
        first, last = _run_time_pads(op, x, out, at)
        return op.Pad(x, op.Concat(op.constant([0, 0]), first, op.constant([0, 0]), last, axis=0))
    n, padding = len(at.pads), at.padding
    return x if padding is None else op.Pad(x, [0, 0, *padding[:n], 0, 0, *padding[n:]])


def _run_time_pads(op: Ops, x: Tensor, out: Tensor, at: Windows) -> tuple[Tensor, Tensor]:
    assert at.spans is not None
    covered = (places(op, out) - 1) * op.constant(at.strides) + op.constant(at.spans)
    total = op.Max(covered - places(op, x), 0)
    small = total / 2
    return (total - small, small) if at.lower else (small, total - small)


def _begins(op: Ops, x: Tensor, out: Tensor, at: Windows) -> Tensor:
    """The padding before the first place of each axis."""
    if at.pads is None:
        return _run_time_pads(op, x, out, at)[0]
    return op.constant([first for first, _ in at.pads])


def places(op: Ops, x: Tensor) -> Tensor:
    """The spatial sizes of a tensor."""
    sizes = known_sizes(x, 2)
    return op.Slice(op.Shape(x), [2], [END]) if sizes is None else op.constant(sizes)


def spread(op: Ops, g: Tensor, weight: Tensor, at: Windows, x: Tensor, group: int = 1) -> Tensor:
    """The adjoint of a correlation: every window of ``g`` is added to its places in ``x``."""
    settings = {**at.settings, "group": group}
    fixed = at.fixed
    if fixed is not None:
        rows = zip(fixed.strides, fixed.counts, fixed.spans, fixed.pads, fixed.sizes, strict=True)
        ends = [s * (o - 1) + span - pad[0] - size for s, o, span, pad, size in rows]
        settings["pads"] = _unless_zero(
            [*(pad[0] for pad in fixed.pads), *(max(e, 0) for e in ends)]
        )
        settings["output_padding"] = _unless_zero([max(-e, 0) for e in ends])
        return op.ConvTranspose(g, weight, **settings)
    if at.pads is not None and set(at.strides) == {1}:
        return op.ConvTranspose(g, weight, **settings, pads=at.padding)
    whole = op.ConvTranspose(g, weight, **settings)
    # ``g`` has a place for each window, like the output for which the padding was computed.
    first = _begins(op, x, g, at)
    last = places(op, x) - places(op, whole) + first
    zero = op.constant([0, 0])
    return op.Pad(whole, op.Concat(zero, op.Neg(first), zero, last, axis=0))


def slices(op: Ops, x: Tensor, at: Windows, axes: Sequence[int]) -> Iterator[Tensor]:
    """For each element κ of the kernel, row by row, the values that all windows read there.

    ``x`` has its padding already; the windows are over its ``axes``.
    """
    if at.plain:
        yield x
        return
    assert at.kernel is not None
    assert at.spans is not None
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
        yield op("Slice", x, starts, ends, list(axes), steps)


def shares(op: Ops, at: Windows, x: Tensor, out: Tensor) -> Array | Tensor:
    """The number of places of ``x`` in each window, padding not counted; at least 1."""
    fixed = at.fixed
    if fixed is not None:
        total: Array = np.ones(())
        for axis, size in enumerate(fixed.sizes):
            first = np.arange(fixed.counts[axis]) * fixed.strides[axis] - fixed.pads[axis][0]
            read = first[:, None] + np.arange(fixed.kernel[axis]) * fixed.dilations[axis]
            inside = ((read >= 0) & (read < size)).sum(axis=1)
            total = total[..., None] * inside
        return np.maximum(total, 1)
    assert at.kernel is not None
    begins, sizes, counts = _begins(op, x, out, at), places(op, x), places(op, out)
    numbers = []
    for axis, k in enumerate(at.kernel):
        starts = count_to(op, op.Gather(counts, axis)) * at.strides[axis] - op.Gather(begins, axis)
        offsets = op.constant([j * at.dilations[axis] for j in range(k)])
        place = op.Unsqueeze(starts, axes=[1]) + offsets
        within = op.And(op.GreaterOrEqual(place, 0), place < op.Gather(sizes, axis))
        number = op.ReduceSum(op.Cast(within, to=x.dtype), axes=[1], keepdims=0)
        later = list(range(1, len(at.kernel) - axis))
        numbers.append(op.Unsqueeze(number, axes=later) if later else number)
    return op.Max(functools.reduce(operator.mul, numbers), 1.0)
