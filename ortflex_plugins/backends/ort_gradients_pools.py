"""Convolutions and pools for onnxruntime's gradient builder: explicit padding, pools as Conv.

The builder differentiates MaxPool, and Conv in two dimensions or without groups; AveragePool only
if every dimension, with the batch, is fixed. So an average becomes a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ortflex_core import Ops, Tensor, numpy_dtype
from ortflex_plugins.backends.ort_gradients_table import known

Attributes = Mapping[str, Any]


def _spatial(x: Tensor) -> list[int] | None:
    """The sizes of an image, without batch and channels, if all are numbers."""
    sizes = None if x.shape is None else x.shape[2:]
    return None if sizes is None or not known(sizes) else list(sizes)


def _explicit(x: Tensor, kernel: Sequence[int], a: Attributes) -> dict[str, Any] | None:
    """The attributes with ``pads`` in place of ``auto_pad``; None if they depend on unknown sizes.

    Source: the definition of auto_pad in the operator's documentation.
    """
    out = {k: v for k, v in a.items() if k != "auto_pad"}
    mode = a.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        return out
    sizes = _spatial(x)
    if sizes is None:
        return None
    strides = a.get("strides") or [1] * len(sizes)
    dilations = a.get("dilations") or [1] * len(sizes)
    begins, ends = [], []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        begins.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
        ends.append(total - begins[-1])
    return out | {"pads": begins + ends}


def _conv(op: Ops, a: Attributes, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor | None:
    shape = w.shape
    if shape is None or not known(shape):
        return None
    grouped_line = a.get("group", 1) != 1 and len(shape) == 3
    if a.get("auto_pad", "NOTSET") == "NOTSET" and not grouped_line:
        return None
    fixed = _explicit(x, shape[2:], a)
    if fixed is None:
        return None
    if not grouped_line:
        return op.Conv(x, w, b, **fixed)
    # The gradient of a grouped convolution is right in two dimensions only.
    flat = {k: [1, *v] for k, v in fixed.items() if k in ("kernel_shape", "strides", "dilations")}
    if "pads" in fixed:
        flat["pads"] = [0, fixed["pads"][0], 0, fixed["pads"][1]]
    plane = op.Conv(op.Unsqueeze(x, [2]), op.Unsqueeze(w, [2]), b, **{**fixed, **flat})
    return op.Squeeze(plane, [2])


def _max_pool(op: Ops, a: Attributes, x: Tensor, *, count: int) -> Any:
    plain = a.get("auto_pad", "NOTSET") == "NOTSET"
    if plain and (count > 1 or not a.get("storage_order", 0)):
        return None
    fixed = _explicit(x, a["kernel_shape"], a)
    if fixed is None:
        return None
    if count == 1:
        fixed.pop("storage_order", None)
    return op.MaxPool(x, outputs=count, **fixed)


def _global_max_pool(op: Ops, a: Attributes, x: Tensor) -> Tensor | None:
    sizes = _spatial(x)
    return op.MaxPool(x, kernel_shape=sizes) if sizes else None


def _average_pool(op: Ops, a: Attributes, x: Tensor) -> Tensor | None:
    """Sums by a convolution with ones, channel by channel, divided by the number of elements."""
    sizes, kernel = _spatial(x), list(a["kernel_shape"])
    fixed = _explicit(x, kernel, a)
    if sizes is None or fixed is None or x.shape is None or not known(x.shape[1:2]):
        return None
    n = len(sizes)
    strides, dilations = fixed.get("strides") or [1] * n, fixed.get("dilations") or [1] * n
    pads = fixed.get("pads") or [0] * 2 * n
    outer = [
        (size + pads[k] + pads[k + n] - (kernel[k] - 1) * dilations[k] - 1, strides[k])
        for k, size in enumerate(sizes)
    ]
    if a.get("ceil_mode", 0) and any(room % stride for room, stride in outer):
        return None
    counts = np.ones(())
    for k, size in enumerate(sizes):
        starts = np.arange(outer[k][0] // strides[k] + 1) * strides[k] - pads[k]
        places = starts[:, None] + np.arange(kernel[k]) * dilations[k]
        inside = ((places >= 0) & (places < size)).sum(1)
        line = np.full(len(starts), kernel[k]) if a.get("count_include_pad", 0) else inside
        counts = np.multiply.outer(counts, line)
    dtype = numpy_dtype(x.dtype)
    ones = op.constant(np.ones((1, 1, *kernel), dtype))
    channels = op.Reshape(x, [-1, 1, *sizes])
    sums = op.Conv(channels, ones, strides=strides, dilations=dilations, pads=pads)
    means = sums * op.constant((1.0 / counts).astype(dtype))
    return op.Reshape(means, np.array([-1, x.shape[1], *counts.shape]))


POOLS: Mapping[str, Callable[..., Any]] = {
    "AveragePool": _average_pool,
    "Conv": _conv,
    "GlobalMaxPool": _global_max_pool,
    "MaxPool": _max_pool,
}
"""Operator → rule, as in :mod:`ortflex_plugins.backends.ort_gradients_rewrites`."""
