"""Sums, extremes, positions of extremes, and normalization by sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_plugins.operators.calls import Call, NotTranslatable, Table, Value, along, axis_of

TABLE = Table()


def _axes(c: Call, inputs: tuple[Value, ...]) -> tuple[int, ...] | None:
    """The axes to reduce; None for no reduction at all."""
    x, axes = inputs[0], c.option("axes", inputs, 1)
    if not axes:
        if c.get("noop_with_empty_axes", 0):
            return None
        return tuple(range(x.ndim))
    return tuple(axis_of(a, x.ndim) for a in axes)


_PLAIN = {"ReduceSum": "sum", "ReduceMean": "mean", "ReduceProd": "prod"}
_BEFORE = {
    "ReduceSumSquare": lambda c, x: x * x,
    "ReduceL2": lambda c, x: x * x,
    "ReduceL1": lambda c, x: c.xp.abs(x),
    "ReduceLogSum": lambda c, x: x,
}
_AFTER = {"ReduceL2": "sqrt", "ReduceLogSum": "log"}


@TABLE(*_PLAIN, *_BEFORE, attributes=("keepdims", "noop_with_empty_axes"))
def _reduce(c: Call, *inputs: Value) -> Value:
    x, axes = inputs[0], _axes(c, inputs)
    x = _BEFORE[c.name](c, x) if c.name in _BEFORE else x
    if axes is not None:
        function = getattr(c.xp, _PLAIN.get(c.name, "sum"))
        x = function(x, axis=axes, keepdims=bool(c.get("keepdims", 1))).astype(x.dtype)
    return getattr(c.xp, _AFTER[c.name])(x) if c.name in _AFTER else x


@TABLE("ReduceMax", "ReduceMin", attributes=("keepdims", "noop_with_empty_axes"))
def _extreme(c: Call, *inputs: Value) -> Value:
    x, axes = inputs[0], _axes(c, inputs)
    if axes is None:
        return x
    low = c.name == "ReduceMax"
    if x.dtype == bool:
        return (c.xp.any if low else c.xp.all)(x, axis=axes, keepdims=bool(c.get("keepdims", 1)))
    if x.dtype.kind in "iu":
        bounds = np.iinfo(x.dtype)
        start: float = bounds.min if low else bounds.max
    else:
        start = -np.inf if low else np.inf
    function = c.xp.max if low else c.xp.min
    return function(x, axis=axes, keepdims=bool(c.get("keepdims", 1)), initial=start)


@TABLE("ReduceLogSumExp", attributes=("keepdims", "noop_with_empty_axes"))
def _log_sum_exp(c: Call, *inputs: Value) -> Value:
    x, axes = inputs[0], _axes(c, inputs)
    if axes is None:
        return x
    top = c.xp.max(x, axis=axes, keepdims=True, initial=-np.inf)
    top = c.xp.where(c.xp.isfinite(top), top, c.xp.zeros_like(top))
    out = c.xp.log(c.xp.sum(c.xp.exp(x - top), axis=axes, keepdims=True)) + top
    return out if c.get("keepdims", 1) else c.xp.squeeze(out, axes)


@TABLE("ArgMax", "ArgMin")
def _arg(c: Call, x: Value) -> Value:
    axis = axis_of(c.get("axis", 0), x.ndim)
    function = c.xp.argmax if c.name == "ArgMax" else c.xp.argmin
    if c.get("select_last_index", 0):
        out = x.shape[axis] - 1 - function(c.xp.flip(x, axis), axis=axis)
    else:
        out = function(x, axis=axis)
    out = out.astype(np.int64)
    return c.xp.expand_dims(out, axis) if c.get("keepdims", 1) else out


@TABLE("CumSum", "CumProd")
def _cumulative(c: Call, x: Value, axis: Value) -> Value:
    along = axis_of(int(c.known(axis, "axis").item()), x.ndim)
    function, start = (c.xp.cumsum, 0) if c.name == "CumSum" else (c.xp.cumprod, 1)
    turned = c.xp.flip(x, along) if c.get("reverse", 0) else x
    if c.get("exclusive", 0):
        index = [slice(None)] * x.ndim
        index[along] = slice(0, -1)
        first = c.xp.full_like(turned[_first(x.ndim, along)], start)
        turned = c.xp.concatenate([first, turned[tuple(index)]], axis=along)
    out = function(turned, axis=along).astype(x.dtype)
    return c.xp.flip(out, along) if c.get("reverse", 0) else out


def _first(rank: int, axis: int) -> tuple[slice, ...]:
    return tuple(slice(0, 1) if k == axis else slice(None) for k in range(rank))


def _two_dimensional(c: Call, x: Value) -> tuple[Value, int]:
    """Before opset 13 the axes from ``axis`` on are one."""
    if c.opset >= 13:
        return x, c.get("axis", -1)
    axis = axis_of(c.get("axis", 1), x.ndim)
    return x.reshape(int(np.prod(x.shape[:axis], dtype=np.int64)), -1), -1


@TABLE("Softmax", "LogSoftmax")
def _softmax(c: Call, x: Value) -> Value:
    flat, axis = _two_dimensional(c, x)
    shifted = flat - c.xp.max(flat, axis=axis, keepdims=True)
    powers = c.xp.exp(shifted)
    below = c.xp.sum(powers, axis=axis, keepdims=True)
    out = powers / below if c.name == "Softmax" else shifted - c.xp.log(below)
    return out.reshape(x.shape)


@TABLE("Hardmax")
def _hardmax(c: Call, x: Value) -> Value:
    flat, axis = _two_dimensional(c, x)
    top = c.xp.expand_dims(c.xp.argmax(flat, axis=axis), axis)
    places = along(np.arange(flat.shape[axis]), axis, flat.ndim)
    return (places == top).astype(x.dtype).reshape(x.shape)


@TABLE("TopK", attributes=("sorted",))
def _top_k(c: Call, *inputs: Value) -> Any:
    x, axis = inputs[0], axis_of(c.get("axis", -1), inputs[0].ndim)
    wanted = c.option("k", inputs, 1)
    assert wanted is not None
    count = wanted[0]
    if c.get("largest", 1):
        order = c.xp.flip(c.forms.order(c.xp.flip(x, axis), axis), axis)
        order = x.shape[axis] - 1 - order
    else:
        order = c.forms.order(x, axis)
    index = [slice(None)] * x.ndim
    index[axis] = slice(0, count)
    chosen = order[tuple(index)]
    return c.xp.take_along_axis(x, chosen, axis=axis), chosen.astype(np.int64)


@TABLE("LpNormalization")
def _lp(c: Call, x: Value) -> Value:
    axis = c.get("axis", -1)
    if c.get("p", 2) == 1:
        below = c.xp.sum(c.xp.abs(x), axis=axis, keepdims=True)
    else:
        below = c.xp.sqrt(c.xp.sum(x * x, axis=axis, keepdims=True))
    return c.xp.where(below == 0, c.xp.zeros_like(x), x / below)


@TABLE("BatchNormalization", attributes=("momentum",))
def _batch_norm(c: Call, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> Any:
    if c.get("training_mode", 0):
        raise NotTranslatable("a BatchNormalization in training mode that ortflex left as it is")
    shape = (1, -1) + (1,) * (x.ndim - 2)
    epsilon = c.xp.asarray(c.get("epsilon", 1e-5), variance.dtype)
    factor = scale / c.xp.sqrt(variance + epsilon)
    out = (x - mean.reshape(shape)) * factor.reshape(shape) + bias.reshape(shape)
    return out.astype(x.dtype)


@TABLE("LayerNormalization")
def _layer_norm(c: Call, x: Value, scale: Value, bias: Value = None) -> Any:
    axes = tuple(range(axis_of(c.get("axis", -1), x.ndim), x.ndim))
    wide = x.astype(np.float32) if c.get("stash_type", 1) == 1 else x
    mean = c.xp.mean(wide, axis=axes, keepdims=True)
    centered = wide - mean
    variance = c.xp.mean(centered * centered, axis=axes, keepdims=True)
    inverse = 1 / c.xp.sqrt(variance + c.xp.asarray(c.get("epsilon", 1e-5), variance.dtype))
    out = (centered * inverse).astype(x.dtype) * scale
    out = out if bias is None else out + bias
    return (out, mean, inverse)[: c.outputs]


@TABLE("InstanceNormalization")
def _instance_norm(c: Call, x: Value, scale: Value, bias: Value) -> Value:
    axes, shape = tuple(range(2, x.ndim)), (1, -1) + (1,) * (x.ndim - 2)
    mean = c.xp.mean(x, axis=axes, keepdims=True)
    centered = x - mean
    variance = c.xp.mean(centered * centered, axis=axes, keepdims=True)
    root = c.xp.sqrt(variance + c.xp.asarray(c.get("epsilon", 1e-5), x.dtype))
    return centered / root * scale.reshape(shape) + bias.reshape(shape)


@TABLE("LRN")
def _lrn(c: Call, x: Value) -> Value:
    size = c.get("size")
    before = (size - 1) // 2
    widths = [(0, 0, 0)] * x.ndim
    widths[1] = (before, size - 1 - before, 0)
    squares = c.forms.pad(x * x, 0, widths)
    total = sum(squares[:, k : k + x.shape[1]] for k in range(size))
    factor = c.xp.asarray(c.get("alpha", 1e-4) / size, x.dtype)
    base = c.xp.asarray(c.get("bias", 1.0), x.dtype) + factor * total
    return x / c.xp.power(base, c.xp.asarray(c.get("beta", 0.75), x.dtype))
