"""Operators that only move, repeat or count elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_core import numpy_dtype
from ortflex_plugins.operators.calls import Call, NotTranslatable, Table, Value, axis_of

TABLE = Table()


TABLE.update(
    {
        "Shape": lambda c, x: np.asarray(x.shape[c.get("start", 0) : c.get("end")], np.int64),
        "Size": lambda c, x: np.asarray(x.size, np.int64),
        "Transpose": lambda c, x: c.xp.transpose(x, c.get("perm")),
        "Tile": lambda c, x, repeats: c.xp.tile(x, c.numbers(repeats, "repeats")),
    }
)


@TABLE("Constant")
def _constant(c: Call) -> Value:
    ((name, _),) = c.attributes.items()
    value = c.get(name)
    if name == "value":
        return np.asarray(value)
    if name in ("value_float", "value_floats"):
        return np.asarray(value, np.float32)
    if name in ("value_int", "value_ints"):
        return np.asarray(value, np.int64)
    raise NotTranslatable(f"a Constant of {name.removeprefix('value_')}")


@TABLE("ConstantOfShape")
def _constant_of_shape(c: Call, shape: Value) -> Value:
    value = np.asarray(c.get("value", np.zeros(1, np.float32))).ravel()
    return np.full(c.numbers(shape, "shape"), value[0], value.dtype)


@TABLE("EyeLike")
def _eye_like(c: Call, x: Value) -> Value:
    to, (rows, columns) = c.get("dtype"), x.shape
    dtype: Any = x.dtype if to is None else numpy_dtype(to)
    return np.eye(rows, columns, c.get("k", 0), dtype=dtype)


@TABLE("Range")
def _range(c: Call, start: Value, limit: Value, delta: Value) -> Value:
    first, last, by = (c.known(v, "bounds") for v in (start, limit, delta))
    return np.arange(first.item(), last.item(), by.item()).astype(first.dtype)


@TABLE("Reshape")
def _reshape(c: Call, x: Value, shape: Value = None) -> Value:
    sizes = c.get("shape") if shape is None else c.numbers(shape, "shape")
    if not c.get("allowzero", 0):
        sizes = [x.shape[k] if size == 0 else size for k, size in enumerate(sizes)]
    if -1 in sizes and x.size == 0:
        rest = int(np.prod([s for s in sizes if s != -1]))
        sizes = [s if s != -1 else (0 if rest == 0 else x.size // rest) for s in sizes]
    return x.reshape(sizes)


@TABLE("Flatten")
def _flatten(c: Call, x: Value) -> Value:
    axis = axis_of(c.get("axis", 1), x.ndim)
    rows = int(np.prod(x.shape[:axis], dtype=np.int64))
    return x.reshape(rows, int(np.prod(x.shape[axis:], dtype=np.int64)))


@TABLE("Squeeze")
def _squeeze(c: Call, *inputs: Value) -> Value:
    axes = c.option("axes", inputs, 1)
    return c.xp.squeeze(inputs[0], None if axes is None else tuple(axes))


@TABLE("Unsqueeze")
def _unsqueeze(c: Call, *inputs: Value) -> Value:
    x, axes = inputs[0], c.option("axes", inputs, 1) or []
    shape = list(x.shape)
    for axis in sorted(axis_of(a, x.ndim + len(axes)) for a in axes):
        shape.insert(axis, 1)
    return x.reshape(shape)


@TABLE("Concat", attributes=("axis",))
def _concat(c: Call, *values: Value) -> Value:
    return c.xp.concatenate(values, axis=c.get("axis", 1)) if len(values) > 1 else values[0]


@TABLE("Split", attributes=("num_outputs",))
def _split(c: Call, *inputs: Value) -> Any:
    x, axis = inputs[0], c.get("axis", 0)
    sizes = c.option("split", inputs, 1)
    if sizes is None:
        size = -(-x.shape[axis] // c.outputs)
        sizes = [size] * (c.outputs - 1)
        sizes.append(x.shape[axis] - sum(sizes))
    ends = np.cumsum(sizes)
    before = (slice(None),) * axis_of(axis, x.ndim)
    return tuple(x[(*before, slice(e - n, e))] for e, n in zip(ends, sizes, strict=True))


@TABLE("Slice")
def _slice(c: Call, *inputs: Value) -> Value:
    x = inputs[0]
    starts, ends = c.option("starts", inputs, 1), c.option("ends", inputs, 2)
    axes, steps = c.option("axes", inputs, 3), c.option("steps", inputs, 4)
    assert starts is not None
    assert ends is not None
    index: list[Any] = [slice(None)] * x.ndim
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axis_of(k if axes is None else axes[k], x.ndim)
        step, size = 1 if steps is None else steps[k], x.shape[axis]
        if step > 0:
            start, end = (min(max(v + size if v < 0 else v, 0), size) for v in (start, end))
            index[axis] = slice(start, max(start, end), step)
        else:
            start = min(max(start + size if start < 0 else start, -1), size - 1)
            end = min(max(end + size if end < 0 else end, -1), size - 1)
            index[axis] = slice(start, None if end < 0 else end, step) if start >= 0 else slice(0)
    return x[tuple(index)]


@TABLE("Expand")
def _expand(c: Call, x: Value, shape: Value) -> Value:
    sizes = np.broadcast_shapes(x.shape, tuple(c.numbers(shape, "shape")))
    return c.xp.broadcast_to(x, sizes)


@TABLE("Pad")
def _pad(c: Call, *inputs: Value) -> Value:
    x, mode = inputs[0], c.get("mode", "constant")
    pads = c.option("pads", inputs, 1)
    assert pads is not None
    axes = range(x.ndim) if len(inputs) < 4 or inputs[3] is None else c.numbers(inputs[3], "axes")
    widths = [(0, 0)] * x.ndim
    for k, axis in enumerate(axes):
        widths[axis] = (pads[k], pads[k + len(pads) // 2])
    if mode == "constant":
        value = inputs[2] if len(inputs) > 2 and inputs[2] is not None else c.get("value", 0.0)
        if isinstance(value, float | int | np.ndarray):
            number = value if isinstance(value, float | int) else value.item()
            return c.forms.pad(x, number, [(low, high, 0) for low, high in widths])
        zeros = c.forms.pad(c.xp.ones(x.shape, bool), False, [(a, b, 0) for a, b in widths])
        wide = c.forms.pad(x, 0, [(low, high, 0) for low, high in widths])
        return c.xp.where(zeros, wide, value.reshape(()))
    cut = tuple(
        slice(max(0, -a), n - max(0, -b)) for n, (a, b) in zip(x.shape, widths, strict=True)
    )
    grown = [(max(0, a), max(0, b)) for a, b in widths]
    return c.xp.pad(x[cut], grown, mode=mode)


@TABLE("DepthToSpace")
def _depth_to_space(c: Call, x: Value) -> Value:
    n, channels, height, width = x.shape
    b = c.get("blocksize")
    if c.get("mode", "DCR") == "DCR":
        parts = x.reshape(n, b, b, channels // b**2, height, width).transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, channels // b**2, b, b, height, width).transpose(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, channels // b**2, height * b, width * b)


@TABLE("SpaceToDepth")
def _space_to_depth(c: Call, x: Value) -> Value:
    n, channels, height, width = x.shape
    b = c.get("blocksize")
    order = (0, 3, 5, 1, 2, 4) if c.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    parts = x.reshape(n, channels, height // b, b, width // b, b).transpose(order)
    return parts.reshape(n, channels * b * b, height // b, width // b)


@TABLE("Trilu")
def _trilu(c: Call, x: Value, k: Value = None) -> Value:
    offset = 0 if k is None else int(c.known(k, "diagonal"))
    mask = np.tri(x.shape[-2], x.shape[-1], offset if not c.get("upper", 1) else offset - 1, bool)
    zero = c.xp.zeros((), x.dtype)
    return c.xp.where(mask, zero, x) if c.get("upper", 1) else c.xp.where(mask, x, zero)


@TABLE("ReverseSequence")
def _reverse_sequence(c: Call, x: Value, lengths: Value) -> Value:
    time, batch = c.get("time_axis", 0), c.get("batch_axis", 1)
    moved = c.xp.moveaxis(x, (time, batch), (0, 1))
    places = c.xp.arange(moved.shape[0])[:, None]
    own = c.xp.asarray(lengths)[None, :]
    index = c.xp.where(places < own, own - 1 - places, places)
    index = index.reshape(index.shape + (1,) * (moved.ndim - 2))
    out = c.xp.take_along_axis(moved, c.xp.broadcast_to(index, moved.shape), axis=0)
    return c.xp.moveaxis(out, (0, 1), (time, batch))


@TABLE("NonZero")
def _non_zero(c: Call, x: Value) -> Value:
    known = c.known(x, "input")
    return np.stack(np.nonzero(np.atleast_1d(known))).astype(np.int64)


@TABLE("Compress")
def _compress(c: Call, x: Value, condition: Value) -> Value:
    chosen, axis = np.flatnonzero(c.known(condition, "condition")), c.get("axis")
    return c.forms.take(x.reshape(-1) if axis is None else x, chosen, 0 if axis is None else axis)


# Resize ------------------------------------------------------------------------------------------


@TABLE(
    *("Resize", "Upsample"),
    attributes=(
        *("cubic_coeff_a", "extrapolation_value"),  # of forms that are refused
        *("keep_aspect_ratio_policy", "nearest_mode"),
    ),
)
def _resize(c: Call, *inputs: Value) -> Value:
    """Axis by axis: nearest elements by index, linear ones by a matrix of weights."""
    x, mode = inputs[0], c.get("mode", "nearest")
    scales, sizes = (*inputs[2:], None, None)[:2]
    if c.name == "Upsample" or c.opset < 11:
        scales, sizes = inputs[1], None
    if mode not in ("nearest", "linear") or c.get("antialias", 0) or _region(c):
        raise NotTranslatable(f"Resize with mode {mode!r}, antialias or a region")
    axes = [axis_of(a, x.ndim) for a in c.get("axes") or range(x.ndim)]
    factors = [] if scales is None else [float(v) for v in c.known(scales, "scales").ravel()]
    wanted = [] if sizes is None else c.numbers(sizes, "sizes")
    if wanted and c.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise NotTranslatable("Resize that keeps the aspect ratio")
    for k, axis in enumerate(axes):
        n = x.shape[axis]
        size = wanted[k] if wanted else int(np.floor(n * factors[k]))
        factor = size / n if wanted else factors[k]
        if size == n and factor == 1:
            continue
        places = _places(c, n, size, factor)
        if mode == "nearest":
            x = c.forms.take(x, np.clip(_nearest(c, places), 0, n - 1), axis)
            continue
        low = np.floor(places).astype(np.int64)
        share = (places - low).astype(x.dtype).reshape([-1] + [1] * (x.ndim - 1 - axis))
        first, second = (c.forms.take(x, np.clip(low + j, 0, n - 1), axis) for j in (0, 1))
        x = first * (1 - share) + second * share
    return x


def _region(c: Call) -> bool:
    """Whether a Resize reads its region."""
    return bool(c.get("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize")


def _places(c: Call, n: int, size: int, factor: float) -> Any:
    """The position in the input of each element of the output."""
    usual = "asymmetric" if c.name == "Upsample" or c.opset < 11 else "half_pixel"
    how, at = c.get("coordinate_transformation_mode", usual), np.arange(size, dtype=np.float64)
    if how == "align_corners":
        return at * ((n - 1) / (n * factor - 1)) if n * factor != 1 else at * 0
    if how == "asymmetric":
        return at / factor
    if how == "pytorch_half_pixel" and size == 1:
        return at * 0
    if how == "half_pixel_symmetric":
        shift = n / 2 * (1 - size / (n * factor))
        return shift + (at + 0.5) / factor - 0.5
    if how in ("half_pixel", "pytorch_half_pixel"):
        return (at + 0.5) / factor - 0.5
    raise NotTranslatable(f"Resize with {how}")


def _nearest(c: Call, places: Any) -> Any:
    how = c.get("nearest_mode", "round_prefer_floor")
    if c.name == "Upsample" or c.opset < 11:
        how = "floor"
    rounded: dict[str, Any] = {
        "round_prefer_floor": lambda p: np.ceil(p - 0.5),
        "round_prefer_ceil": lambda p: np.floor(p + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    return rounded[how](places).astype(np.int64)
