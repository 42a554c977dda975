"""Convolutions and pooling in numpy, place by place of the kernel, as the standard defines them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from ortflex_core import Array

Ints = Sequence[int]


def _ones(given: Ints | None, n: int) -> Ints:
    return [1] * n if given is None else given


def counts(sizes: Ints, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints) -> list[int]:
    n = len(kernel)
    rows = zip(sizes, kernel, strides, dilations, pads[:n], pads[n:], strict=True)
    return [(d + a + b - e * (k - 1) - 1) // s + 1 for d, k, s, e, a, b in rows]


def taps(
    x: Array, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints, out: Ints, fill: float
) -> Iterator[tuple[tuple[int, ...], Array]]:
    """For each place of the kernel what lies there in every window."""
    n = len(kernel)
    # Room at the end for windows that reach beyond the padding.
    rows = zip(out, strides, dilations, kernel, strict=True)
    reach = [(o - 1) * s + d * (k - 1) + 1 for o, s, d, k in rows]
    ends = [max(r - size - a, 0) for r, size, a in zip(reach, x.shape[2:], pads[:n], strict=True)]
    whole = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], ends, strict=True)], constant_values=fill)
    for place in product(*map(range, kernel)):
        at = zip(place, dilations, strides, out, strict=True)
        cut = [slice(k * d, k * d + s * (o - 1) + 1, s) for k, d, s, o in at]
        yield place, whole[(slice(None), slice(None), *cut)]


def conv(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    strides: Ints | None = None,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    group: int = 1,
) -> Array:
    kernel, n = w.shape[2:], w.ndim - 2
    strides, dilations, pads = _ones(strides, n), _ones(dilations, n), pads or [0] * 2 * n
    out = counts(x.shape[2:], kernel, strides, dilations, pads)
    y = np.zeros((x.shape[0], group, w.shape[0] // group, *out))
    weights = w.reshape(group, -1, *w.shape[1:])
    for place, part in taps(x, kernel, strides, dilations, pads, out, 0.0):
        parts = part.reshape(len(x), group, -1, *out)
        y += np.einsum("ngc...,gmc->ngm...", parts, weights[(..., *place)])
    y = y.reshape(x.shape[0], w.shape[0], *out)
    return y if b is None else y + b.reshape(-1, *[1] * n)


def conv_transpose(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    strides: Ints | None = None,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    more: Ints | None = None,
    group: int = 1,
) -> Array:
    kernel, n, sizes = w.shape[2:], w.ndim - 2, x.shape[2:]
    strides, dilations, pads = _ones(strides, n), _ones(dilations, n), pads or [0] * 2 * n
    rows = zip(sizes, strides, kernel, dilations, more or [0] * n, strict=True)
    full = [s * (o - 1) + e + d * (k - 1) + 1 for o, s, k, d, e in rows]
    y = np.zeros((len(x), group, w.shape[1], *full))
    parts = x.reshape(len(x), group, -1, *sizes)
    weights = w.reshape(group, -1, *w.shape[1:])
    for place in product(*map(range, kernel)):
        at = zip(place, dilations, strides, sizes, strict=True)
        cut = [slice(k * d, k * d + s * (o - 1) + 1, s) for k, d, s, o in at]
        y[(..., *cut)] += np.einsum("ngc...,gcm->ngm...", parts, weights[(..., *place)])
    y = y.reshape(len(x), -1, *full)
    y = y[(..., *(slice(a, f - e) for a, e, f in zip(pads[:n], pads[n:], full, strict=True)))]
    return y if b is None else y + b.reshape(-1, *[1] * n)


def pool(
    kind: str,
    x: Array,
    kernel: Ints,
    *,
    strides: Ints | None = None,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    out: Ints | None = None,
    p: int = 2,
) -> Array:
    """``kind``: max, mean, padded (a mean that counts the padding), norm."""
    n = len(kernel)
    strides, dilations, pads = _ones(strides, n), _ones(dilations, n), pads or [0] * 2 * n
    out = out or counts(x.shape[2:], kernel, strides, dilations, pads)

    def stacked(values: Array, fill: float) -> Any:
        parts = taps(values, kernel, strides, dilations, pads, out, fill)
        return np.stack([part for _, part in parts])

    if kind == "max":
        return stacked(x, -np.inf).max(axis=0)
    if kind == "norm":
        return (abs(stacked(x, 0.0)) ** p).sum(axis=0) ** (1 / p)
    total = stacked(x, 0.0).sum(axis=0)
    if kind == "mean":
        return total / stacked(np.ones_like(x), 0.0).sum(axis=0)
    sides = [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)]
    inside = np.pad(np.ones_like(x), sides, constant_values=1.0)
    rows = taps(inside, kernel, strides, dilations, [0] * 2 * n, out, 0.0)
    return total / np.stack([part for _, part in rows]).sum(axis=0)
