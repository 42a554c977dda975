"""Matrix products, convolutions and windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_plugins.operators.calls import Call, NotTranslatable, Table, Value, along

TABLE = Table()
MOST_UNROLLED = 128
"""Windows or elements of windows with an operator of their own; more take long to compile."""


@TABLE("MatMul")
def _matmul(c: Call, a: Value, b: Value) -> Value:
    summed = _sum(c, a, b)
    return c.forms.matmul(a, b) if summed is None else summed


def _sum(c: Call, a: Value, b: Value) -> Value:
    """The product if one factor is a constant vector of ones, computed as a sum; otherwise None.

    onnxruntime sums the rows of a matrix faster as a product; XLA sums them faster than it multiplies.
    """
    if b.ndim == 2 and _ones(a):
        return c.xp.sum(b, axis=0, keepdims=a.ndim == 2)
    if a.ndim == 2 and _ones(b):
        return c.xp.sum(a, axis=1, keepdims=b.ndim == 2)
    return None


def _ones(x: Value) -> bool:
    """Whether this is a constant vector of ones, or a matrix of one row or column."""
    vector = isinstance(x, np.ndarray) and x.ndim in (1, 2) and x.size == max(x.shape)
    return vector and bool((x == 1).all())


@TABLE("Gemm")
def _gemm(c: Call, a: Value, b: Value, bias: Value = None) -> Value:
    left, right = bool(c.get("transA", 0)), bool(c.get("transB", 0))
    out = _sum(c, a.T if left else a, b.T if right else b)
    out = c.forms.dot(a, b, (left, right)) if out is None else out
    alpha, beta = c.get("alpha", 1.0), c.get("beta", 1.0)
    out = out if alpha == 1 else out * c.xp.asarray(alpha, out.dtype)
    if bias is None or beta == 0:
        return out
    return out + (bias if beta == 1 else bias * c.xp.asarray(beta, out.dtype))


TABLE.update(
    {
        "Einsum": lambda c, *values: c.xp.einsum(c.get("equation").replace(" ", ""), *values),
        "Det": lambda c, x: c.xp.linalg.det(x),
    }
)


# Windows -----------------------------------------------------------------------------------------


@attrs.frozen
class Windows:
    """The windows over the last axes of a tensor."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    places: tuple[int, ...]
    """The number of windows along each axis."""

    def taps(self) -> Iterator[tuple[int, ...]]:
        """The elements of a window, by position."""
        return itertools.product(*map(range, self.kernel))

    def part(self, tap: Sequence[int]) -> tuple[slice, ...]:
        """The elements of the padded axes at a tap, window by window."""
        return tuple(
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, s, n in zip(tap, self.dilations, self.strides, self.places, strict=True)
        )

    @property
    def whole(self) -> tuple[bool, ...]:
        """For each axis whether the windows have one element there, and every place is one of them."""
        each = zip(self.kernel, self.strides, self.pads, strict=True)
        return tuple(k == s == 1 and pad == (0, 0) for k, s, pad in each)


def windows(c: Call, sizes: Sequence[int], kernel: Sequence[int]) -> Windows:
    """The windows of a convolution or a pool over axes of these sizes."""
    rank = len(sizes)
    strides = c.get("strides") or [1] * rank
    dilations = c.get("dilations") or [1] * rank
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    given, automatic = c.get("pads") or [0] * 2 * rank, c.get("auto_pad", "NOTSET")
    pads = list(zip(given[:rank], given[rank:], strict=True))
    if automatic == "VALID":
        pads = [(0, 0)] * rank
    elif automatic.startswith("SAME"):
        pads = []
        for n, e, s in zip(sizes, extents, strides, strict=True):
            whole = max(0, (-(-n // s) - 1) * s + e - n)
            less, more = whole // 2, whole - whole // 2
            pads.append((less, more) if automatic == "SAME_UPPER" else (more, less))
    places = []
    for k, (n, e, s) in enumerate(zip(sizes, extents, strides, strict=True)):
        room = n + sum(pads[k]) - e
        count = room // s + 1
        if c.get("ceil_mode", 0) and room % s and count * s < n + pads[k][0]:
            count += 1  # one that begins inside; its end is padded
            pads[k] = (pads[k][0], pads[k][1] + s - room % s)
        places.append(count)
    return Windows(*map(tuple, (kernel, strides, dilations, pads, places)))


def padded(c: Call, x: Value, w: Windows, value: float) -> Value:
    """The tensor with its last axes padded."""
    front = x.ndim - len(w.pads)
    return c.forms.pad(x, value, [(0, 0, 0)] * front + [(a, b, 0) for a, b in w.pads])


@TABLE("MaxPool", attributes=("storage_order",))
def _max_pool(c: Call, x: Value) -> Any:
    w = windows(c, x.shape[2:], c.get("kernel_shape"))
    kind = x.dtype
    if kind.kind in "iu":
        # Padding is less than every element, or its place could be that of the maximum.
        wide = padded(c, x.astype(np.int32), w, int(np.iinfo(kind).min) - 1)
    else:
        wide = padded(c, x, w, -np.inf)
    best, where = None, None
    sizes = x.shape[2:]
    for tap in w.taps():
        part = wide[(..., *w.part(tap))]
        if c.outputs == 1:
            best = part if best is None else c.xp.maximum(best, part)
            continue
        here = np.broadcast_to(_places(w, tap, sizes, c.get("storage_order", 0)), part.shape)
        if best is None:
            best, where = part, here
        else:
            better = part > best
            best, where = c.xp.maximum(best, part), c.xp.where(better, here, where)
    assert best is not None
    best = best.astype(kind) if kind.kind in "iu" else best
    if where is None:
        return best
    planes = np.arange(x.shape[0] * x.shape[1], dtype=np.int64) * int(np.prod(sizes))
    shape = (*x.shape[:2], *(1,) * len(sizes))
    return best, where + planes.reshape(shape)


def _places(w: Windows, tap: Sequence[int], sizes: Sequence[int], by_column: int) -> Any:
    """The position of a tap's element in its plane, for every window."""
    out: Any = np.zeros((1,) * len(sizes), np.int64)
    factor = 1
    order = range(len(sizes)) if by_column else reversed(range(len(sizes)))
    for axis in order:
        own = np.arange(w.places[axis], dtype=np.int64) * w.strides[axis]
        own = own + tap[axis] * w.dilations[axis] - w.pads[axis][0]
        out = out + along(own, axis, len(sizes)) * factor
        factor *= sizes[axis]
    return out


@TABLE("AveragePool", "LpPool")
def _average_pool(c: Call, x: Value) -> Value:
    given = c.get("pads") or [0] * 2 * (x.ndim - 2)
    w = windows(c, x.shape[2:], c.get("kernel_shape"))
    power = c.get("p", 2) if c.name == "LpPool" else 1
    wide = padded(c, x if c.name == "AveragePool" else c.xp.abs(x) ** power, w, 0)
    total = sum(wide[(..., *w.part(tap))] for tap in w.taps())
    if c.name == "LpPool":
        return total ** c.xp.asarray(1 / power, x.dtype)
    counted = np.ones(x.shape[2:], np.float32)
    pads = [(p, 0) for p, _ in w.pads]
    if c.get("count_include_pad", 0):
        # Elements that ceil_mode adds at the end are not counted.
        rank = len(w.pads)
        pads = list(w.pads)
        if c.get("auto_pad", "NOTSET") == "NOTSET":
            pads = list(zip(given[:rank], given[rank:], strict=True))
        counted = np.pad(counted, pads, constant_values=1)
        pads = [(0, 0)] * rank
    missing = [
        (low, n + sum(own) - low - size)
        for (low, _), n, own, size in zip(pads, x.shape[2:], w.pads, counted.shape, strict=True)
    ]
    counted = np.pad(counted, missing)
    count = sum(counted[w.part(tap)] for tap in w.taps())
    return total / np.asarray(count).astype(x.dtype)


@TABLE("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(c: Call, x: Value) -> Value:
    axes = tuple(range(2, x.ndim))
    if c.name == "GlobalMaxPool":
        return c.xp.max(x, axis=axes, keepdims=True)
    if c.name == "GlobalAveragePool":
        return c.xp.mean(x, axis=axes, keepdims=True)
    power = c.get("p", 2)
    total = c.xp.sum(c.xp.abs(x) ** power, axis=axes, keepdims=True)
    return total ** c.xp.asarray(1 / power, x.dtype)


@TABLE("Conv", attributes=("kernel_shape",))
def _conv(c: Call, x: Value, weight: Value, bias: Value = None) -> Value:
    w = windows(c, x.shape[2:], weight.shape[2:])
    groups = c.get("group", 1)
    axes = [axis for axis, whole in enumerate(w.whole) if not whole]
    places = math.prod(w.places[k] for k in axes)
    if 0 < places < min(math.prod(w.kernel[k] for k in axes), MOST_UNROLLED):
        out = _by_places(c, x, weight, w, groups, axes)
    elif (inner := _by_sample(c, x, weight, ())) is not None:
        return _samples_last(c, _conv(inner, _samples_first(c, x), weight[..., 0], bias))
    else:
        out = c.forms.convolve(x, weight, w.strides, w.pads, w.dilations, groups)
        if out is None:
            out = _by_taps(c, x, weight, w, groups)
    return out if bias is None else out + bias.reshape((1, -1) + (1,) * (x.ndim - 2))


def _by_sample(c: Call, x: Value, weight: Value, extra: Sequence[int]) -> Call | None:
    """The call for X with its last axis as the first one, if each sample is then convolved alone.

    Gradient rules make the samples an axis because onnxruntime is slow sample by sample. ``extra`` is the
    attribute ``output_padding``.
    """
    n = x.ndim - 2
    strides, pads = c.get("strides") or [1] * n, c.get("pads") or [0] * 2 * n
    last = (x.shape[0], weight.shape[-1], strides[-1], pads[n - 1], pads[-1], *extra[-1:])
    alone = last[:3] == (1, 1, 1) and not any(last[3:]) and c.get("auto_pad", "NOTSET") == "NOTSET"
    if n < 2 or not alone or not c.forms.samples_first:
        return None
    dilations = c.get("dilations") or [1] * n
    inner = {
        "strides": strides[:-1],
        "dilations": dilations[:-1],
        "pads": pads[: n - 1] + pads[n:-1],
        "output_padding": list(extra[:-1]),
    }
    return attrs.evolve(c, attributes={**c.attributes, **inner})


def _samples_first(c: Call, x: Value) -> Value:
    return c.xp.transpose(x[0], [x.ndim - 2, *range(x.ndim - 2)])


def _samples_last(c: Call, x: Value) -> Value:
    return c.xp.transpose(x, [*range(1, x.ndim), 0])[None]


def _by_taps(c: Call, x: Value, weight: Value, w: Windows, groups: int) -> Value:
    """A convolution as one matrix product a group, over the stacked elements of all windows."""
    rows, channels = x.shape[:2]
    out_channels, taps = weight.shape[0], int(np.prod(w.kernel))
    wide = padded(c, x, w, 0)
    parts = [wide[(..., *w.part(tap))] for tap in w.taps()]
    columns = c.xp.stack(parts, axis=2)  # [rows, channels, taps, places…]
    places = int(np.prod(w.places))
    columns = columns.reshape(rows, groups, channels // groups * taps, places)
    matrix = weight.reshape(groups, out_channels // groups, -1)
    return c.xp.matmul(matrix, columns).reshape(rows, out_channels, *w.places)


def _by_places(
    c: Call, x: Value, weight: Value, w: Windows, groups: int, axes: Sequence[int]
) -> Value:
    """A convolution as a matrix product a group for each place on ``axes``; all others are whole.

    A kernel's gradient has few places and a large kernel; XLA's own convolution takes twice as long.
    """
    rows, out_channels = x.shape[0], weight.shape[0]
    wide = padded(c, x, w, 0)
    inner = [axis for axis in range(len(w.kernel)) if axis not in axes]
    order = [0, 1, *(2 + axis for axis in (*axes, *inner))]
    matrix = weight.reshape(groups, out_channels // groups, -1)
    products = []
    for place in itertools.product(*(range(w.places[axis]) for axis in axes)):
        window = [slice(None)] * len(w.kernel)
        for axis, at in zip(axes, place, strict=True):
            first, step = at * w.strides[axis], w.dilations[axis]
            window[axis] = slice(first, first + step * (w.kernel[axis] - 1) + 1, step)
        part = c.xp.transpose(wide[(..., *window)], order)
        products.append(c.forms.matmul(matrix, part.reshape(rows, groups, matrix.shape[2], -1)))
    sizes = [w.places[axis] for axis in (*axes, *inner)]
    out = c.xp.stack(products, axis=3).reshape(rows, out_channels, *sizes)
    return c.xp.transpose(out, [order.index(axis) for axis in range(x.ndim)])


@TABLE("ConvTranspose", attributes=("kernel_shape",))
def _conv_transpose(c: Call, x: Value, weight: Value, bias: Value = None) -> Value:
    rank, groups = x.ndim - 2, c.get("group", 1)
    kernel = weight.shape[2:]
    strides, dilations = c.get("strides") or [1] * rank, c.get("dilations") or [1] * rank
    extra = c.get("output_padding") or [0] * rank
    asked = c.get("output_shape")
    if asked is None and (inner := _by_sample(c, x, weight, extra)) is not None:
        return _samples_last(c, _conv_transpose(inner, _samples_first(c, x), weight[..., 0], bias))
    extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    whole = [(n - 1) * s + e for n, s, e in zip(x.shape[2:], strides, extents, strict=True)]
    pads = list(c.get("pads") or [0] * 2 * rank)
    sizes, automatic = asked, c.get("auto_pad", "NOTSET")
    if sizes is None and automatic.startswith("SAME"):
        sizes = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    if sizes is not None:
        sizes = sizes[-rank:]
        for k in range(rank):
            cut = whole[k] + extra[k] - sizes[k]
            less, more = cut // 2, cut - cut // 2
            pads[k], pads[k + rank] = (less, more) if automatic == "SAME_UPPER" else (more, less)
    rows, channels = x.shape[:2]
    out_channels, taps = weight.shape[1], int(np.prod(kernel))
    matrix = weight.reshape(groups, channels // groups, out_channels * taps)
    flat = x.reshape(rows, groups, channels // groups, -1)
    margins = [(e - 1 - pads[k], e - 1 + extra[k] - pads[k + rank]) for k, e in enumerate(extents)]
    turned = c.xp.flip(weight, tuple(range(2, weight.ndim)))
    turned = turned.reshape(groups, channels // groups, out_channels, *kernel)
    turned = c.xp.swapaxes(turned, 1, 2).reshape(groups * out_channels, channels // groups, *kernel)
    made = c.forms.convolve(x, turned, [1] * rank, margins, dilations, groups, strides)
    if made is not None:
        return made if bias is None else made + bias.reshape((1, -1) + (1,) * rank)
    columns = c.xp.matmul(c.xp.swapaxes(matrix, 1, 2), flat)
    columns = columns.reshape(rows, groups * out_channels, taps, *x.shape[2:])
    total: Any = None
    for at, tap in enumerate(itertools.product(*map(range, kernel))):
        grown = [(0, 0, 0), (0, 0, 0)]
        for k in range(rank):
            before = tap[k] * dilations[k]
            spread = (x.shape[2 + k] - 1) * strides[k] + 1
            after = whole[k] + extra[k] - before - spread
            grown.append((before - pads[k], after - pads[k + rank], strides[k] - 1))
        part = c.forms.pad(columns[:, :, at], 0, grown)
        total = part if total is None else total + part
    if total is None:
        raise NotTranslatable("a ConvTranspose with an empty kernel")
    return total if bias is None else total + bias.reshape((1, -1) + (1,) * rank)
