"""Rewrites of nodes that onnxruntime's gradient builder differentiates incorrectly.

Every rewrite computes the same values as its node. A rewrite that does not apply returns None; the
later check then refuses the node. The builder differentiates MaxPool, and Conv in two dimensions or
without groups; AveragePool only if every dimension, with the batch, is fixed. So paddings become explicit,
and an average becomes a convolution.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from ortflex_core import Ops, Tensor, numpy_dtype
from ortflex_plugins.backends.ort_gradients_table import VIEWS, known, same

Outputs = Tensor | Sequence[Tensor] | None
Attributes = Mapping[str, Any]
Rule = Callable[..., Outputs]


def softplus(op: Ops, x: Tensor) -> Tensor:
    """log(1 + exp(x)), stable at any x."""
    return op.Max(x, 0.0) + op.Log(1.0 + op.Exp(-op.Abs(x)))


def _exponential(op: Ops, x: Tensor, alpha: float, inner: float = 1.0) -> Tensor:
    """The value x where x > 0, otherwise alpha·(exp(x/inner) − 1)."""
    return op.Max(x, 0.0) + alpha * (op.Exp(op.Min(x, 0.0) / inner) - 1.0)


def _select(op: Ops, condition: Tensor, x: Tensor) -> Outputs:
    """The value of x where the condition holds, otherwise 0."""
    return op.Where(condition, x, op.constant(0.0, x.dtype))


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms)


def _gelu(op: Ops, a: Attributes, x: Tensor) -> Outputs:
    if a.get("approximate", "none") != "tanh":
        return None
    # The builder uses the derivative of the exact Gelu.
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * op.Pow(x, 3.0))
    return 0.5 * x * (1.0 + op.Tanh(inner))


def _double(x: Tensor) -> bool:
    return x.dtype == TensorProto.DOUBLE


def _log_softmax(op: Ops, a: Attributes, x: Tensor) -> Tensor | None:
    if not _double(x):
        return None
    return x - op.ReduceLogSumExp(x, axes=[a.get("axis", -1)], keepdims=1)


def _softmax(op: Ops, a: Attributes, x: Tensor) -> Outputs:
    logarithm = _log_softmax(op, a, x)
    return None if logarithm is None else op.Exp(logarithm)


def _mul(op: Ops, a: Attributes, x: Tensor, y: Tensor) -> Outputs:
    # A parameter that only one node reads, twice, gets two gradients with the same name.
    return op.Pow(x, 2.0) if x is y and x.node is None else None


def _add(op: Ops, a: Attributes, x: Tensor, y: Tensor) -> Outputs:
    return 2.0 * x if x is y and x.node is None else None


def _div(op: Ops, a: Attributes, x: Tensor, y: Tensor) -> Outputs:
    root = x
    while root.node is not None and root.node.op_type in VIEWS and root.node.inputs[0] is not None:
        root = root.node.inputs[0]
    plain = root.node is not None or root.constant is not None or y.constant is not None
    return None if plain else x * op.Reciprocal(y)


def _pow(op: Ops, a: Attributes, x: Tensor, y: Tensor) -> Outputs:
    return None if x.dtype == y.dtype or y.constant is None else op.Pow(x, op.Cast(y, to=x.dtype))


def _matmul(op: Ops, a: Attributes, x: Tensor, y: Tensor) -> Outputs:
    ranks = x.rank, y.rank
    if None in ranks or 1 not in ranks or ranks == (1, 2):
        return None
    left = op.Unsqueeze(x, [0]) if x.rank == 1 else x
    right = op.Unsqueeze(y, [-1]) if y.rank == 1 else y
    axes = [axis for axis, t in ((-2, x), (-1, y)) if t.rank == 1]
    return op.Squeeze(op.MatMul(left, right), axes)


def _gemm(op: Ops, a: Attributes, x: Tensor, y: Tensor, c: Tensor | None = None) -> Outputs:
    if c is None or c.rank != 0:
        return None
    return op.Gemm(x, y, op.Reshape(c, [1]), **a)


def _transpose(op: Ops, a: Attributes, x: Tensor) -> Outputs:
    if a.get("perm") or not x.rank:
        return None
    return op.Transpose(x, perm=list(reversed(range(x.rank))))


def _where(op: Ops, a: Attributes, condition: Tensor, x: Tensor, y: Tensor) -> Outputs:
    plain = op.Where(condition, x, y)
    if same(x.shape, plain.shape) and same(y.shape, plain.shape):
        return None
    shape = op.Shape(plain)
    expanded = [t if same(t.shape, plain.shape) else op.Expand(t, shape) for t in (x, y)]
    for tensor in expanded:
        tensor.shape = plain.shape
    return op.Where(condition, *expanded)


def _axes(a: Attributes, inputs: Sequence[Tensor | None]) -> tuple[bool, list[int] | None]:
    """(whether the axes are known, the axes or None for all)."""
    if len(inputs) > 1 and inputs[1] is not None:
        constant = inputs[1].constant
        return constant is not None, None if constant is None else [int(i) for i in constant]
    return True, list(a["axes"]) if a.get("axes") else None


def _reduction(op_type: str, before: str | None = None, after: str | None = None) -> Rule:
    """A reduction with keepdims=1, between two elementwise operators."""

    def rule(op: Ops, a: Attributes, *inputs: Tensor | None) -> Outputs:
        x = inputs[0]
        assert x is not None
        fixed, axes = _axes(a, inputs)
        if not fixed or (not axes and a.get("noop_with_empty_axes")):
            return None
        keep, other = a.get("keepdims", 1), before or after or op_type == "ReduceSum"
        if keep and not other:
            return None
        if before:
            x = op.Pow(x, 2.0) if before == "Pow" else op(before, x)
        y = op(op_type, x, axes=axes or None, keepdims=keep if other else 1)
        if not keep and not other:
            y = op.Squeeze(y, axes=axes) if axes else op.Reshape(y, np.zeros(0, np.int64))
        return op(after, y) if after else y

    return rule


def _split(
    op: Ops, a: Attributes, x: Tensor, sizes: Tensor | None = None, *, count: int
) -> Outputs:
    axis = a.get("axis", 0)
    if x.rank is None or x.shape is None:
        return None
    size = x.shape[axis]
    if sizes is not None:
        parts = None if sizes.constant is None else [int(s) for s in sizes.constant]
    elif isinstance(size, int):
        each = -(-size // count)
        parts = [each] * (count - 1) + [size - each * (count - 1)]
    else:
        parts = None
    if parts is None:
        return None
    ends = np.cumsum(parts)
    return [op.Slice(x, [int(e) - p], [int(e)], [axis]) for e, p in zip(ends, parts, strict=True)]


def _pad(
    op: Ops,
    a: Attributes,
    x: Tensor,
    pads: Tensor,
    value: Tensor | None = None,
    axes: Tensor | None = None,
) -> Outputs:
    if axes is None or axes.constant is None or pads.constant is None or x.rank is None:
        return None
    all_pads = np.zeros((2, x.rank), np.int64)
    all_pads[:, axes.constant] = pads.constant.reshape(2, -1)
    return op.Pad(x, all_pads.reshape(-1), value, **a)


def _layer_norm(
    op: Ops, a: Attributes, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Outputs:
    if bias is None:
        if scale.shape is None or not known(scale.shape):
            return None
        bias = op.constant(np.zeros(scale.shape, numpy_dtype(scale.dtype)))
    return op.LayerNormalization(x, scale, bias, outputs=3, **a)


def _instance_norm(op: Ops, a: Attributes, x: Tensor, scale: Tensor, bias: Tensor) -> Outputs:
    if x.rank is None:
        return None
    axes = list(range(2, x.rank))
    centered = x - op.ReduceMean(x, axes=axes, keepdims=1)
    variance = op.ReduceMean(op.Pow(centered, 2.0), axes=axes, keepdims=1)
    trailing = [1 + k for k in range(len(axes))]
    epsilon: float = a.get("epsilon", 1e-5)
    factor = op.Reciprocal(op.Sqrt(variance + epsilon))
    return centered * factor * op.Unsqueeze(scale, trailing) + op.Unsqueeze(bias, trailing)


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


RULES: Mapping[str, Rule] = {
    "Add": _add,
    "AveragePool": _average_pool,
    "CastLike": lambda op, a, x, like: op.Cast(x, to=like.dtype),
    "Celu": lambda op, a, x: _exponential(op, x, a.get("alpha", 1.0), a.get("alpha", 1.0)),
    "Conv": _conv,
    "Div": _div,
    "Elu": lambda op, a, x: _exponential(op, x, a.get("alpha", 1.0)),
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GlobalMaxPool": _global_max_pool,
    "HardSigmoid": lambda op, a, x: op.Clip(a.get("alpha", 0.2) * x + a.get("beta", 0.5), 0.0, 1.0),
    "HardSwish": lambda op, a, x: x * op.Clip((1 / 6) * x + 0.5, 0.0, 1.0),
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
    "Mean": lambda op, a, *terms: (1.0 / len(terms)) * _total(terms),
    "Mish": lambda op, a, x: x * op.Tanh(softplus(op, x)),
    "Mul": _mul,
    "PRelu": lambda op, a, x, slope: op.Max(x, 0.0) + slope * op.Min(x, 0.0),
    "Pad": _pad,
    "Pow": _pow,
    "ReduceL1": _reduction("ReduceSum", before="Abs"),
    "ReduceL2": _reduction("ReduceL2"),
    "ReduceLogSum": _reduction("ReduceSum", after="Log"),
    "ReduceLogSumExp": _reduction("ReduceLogSumExp"),
    "ReduceMean": _reduction("ReduceMean"),
    "ReduceSumSquare": _reduction("ReduceSum", before="Pow"),
    "Relu": lambda op, a, x: _select(op, x > 0.0, x) if _double(x) else None,
    "Selu": lambda op, a, x: (
        a.get("gamma", 1.05070102214813232421875)
        * _exponential(op, x, a.get("alpha", 1.67326319217681884765625))
    ),
    "Softmax": _softmax,
    "SoftmaxCrossEntropyLoss": lambda op, a, *inputs: op.SoftmaxCrossEntropyLoss(
        *inputs, outputs=2, **a
    ),
    "Softplus": lambda op, a, x: softplus(op, x),
    "Softsign": lambda op, a, x: x * op.Reciprocal(1.0 + op.Abs(x)),
    "Split": _split,
    "Sum": lambda op, a, *terms: _total(terms),
    "Tan": lambda op, a, x: op.Sin(x) / op.Cos(x),
    "ThresholdedRelu": lambda op, a, x: _select(op, x > a.get("alpha", 1.0), x),
    "Transpose": _transpose,
    "Where": _where,
}
"""Operator → rule(op, attributes, *inputs): the outputs (or the one output), or None."""
