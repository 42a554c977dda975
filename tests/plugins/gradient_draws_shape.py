"""Draws of the operators that change a tensor's shape or move its parts."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np

from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import (
    Draw,
    Draws,
    axes_of,
    axis_of,
    drawn,
    numbers,
    shapes,
    smaller,
    torch,
)

DRAWS = Draws()


def at_run_time(draw: Draw, values: list[int], arrays: dict[str, Any], name: str) -> Any:
    """A list of integers, as constants or as an input; what to call it by in a formula."""
    if draw(st.booleans()):
        arrays[name] = np.array(values, np.int64)
        return lambda op, given: given[name]
    return lambda op, given: op.constant(np.array(values, np.int64))


@DRAWS.of("Reshape")
def reshape(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(0, 4))
    target = list(draw(st.permutations(shape)))
    if draw(st.booleans()) and len(target) > 1:
        target[:2] = [target[0] * target[1]]
    if draw(st.booleans()):
        target.insert(draw(st.integers(0, len(target))), 1)
    exact = tuple(target)
    kept = [k for k, d in enumerate(target) if k < len(shape) and shape[k] == d]
    if kept and draw(st.booleans()):
        target[draw(st.sampled_from(kept))] = 0
    open_ = [k for k, d in enumerate(target) if d]
    if open_ and draw(st.booleans()):
        target[draw(st.sampled_from(open_))] = -1
    arrays = {"x": numbers(draw, shape)}
    to = at_run_time(draw, target, arrays, "s")
    return drawn(
        f"Reshape to {target}",
        lambda op, x, **given: op.Reshape(x, to(op, given)),
        arrays,
        torch=lambda x, **_: x.reshape(exact),
    )


@DRAWS.of("Flatten")
def flatten(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(0, 4))
    axis = draw(st.integers(-len(shape), len(shape)))
    rows = int(np.prod(shape[:axis] if axis else ()))
    return drawn(
        f"Flatten {axis}",
        lambda op, x: op.Flatten(x, axis=axis),
        {"x": numbers(draw, shape)},
        torch=lambda x: x.reshape(rows, -1),
    )


@DRAWS.of("Transpose")
def transpose(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(0, 4))
    perm = draw(st.none() | st.permutations(range(len(shape))))
    return drawn(
        f"Transpose {perm}",
        lambda op, x: op.Transpose(x, perm=perm),
        {"x": numbers(draw, shape)},
        torch=lambda x: x.permute(tuple(range(x.ndim))[::-1] if perm is None else tuple(perm)),
    )


@DRAWS.of("Squeeze", "Unsqueeze")
def squeeze(draw: Draw, operator: str) -> Case:
    short = draw(shapes(0, 3))
    rank = len(short) + draw(st.integers(1, 2))
    places = draw(st.permutations(range(rank)))[: rank - len(short)]
    rest = iter(short)
    long = tuple(1 if k in places else next(rest) for k in range(rank))
    axes = [k - rank if draw(st.booleans()) else k for k in places]
    arrays = {"x": numbers(draw, long if operator == "Squeeze" else short)}
    every = operator == "Squeeze" and 1 not in short and draw(st.booleans())
    # Axes that are not known before the graph runs leave the rank unknown.
    to = at_run_time(draw, axes, arrays, "axes") if not every else None
    target = short if operator == "Squeeze" else long
    return drawn(
        f"{operator} {'all' if every else axes}",
        lambda op, x, **given: op(operator, x, *([] if to is None else [to(op, given)])),
        arrays,
        torch=lambda x, **_: x.reshape(target),
    )


@DRAWS.of("Expand")
def expand(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(0, 3))
    front = draw(shapes(0, 1))
    x = smaller(draw, shape)
    # A size of 1 leaves the tensor's own.
    own = (1,) * (len(shape) - len(x)) + x
    pairs = zip(own, shape, strict=True)
    asked = [*front, *(1 if o == d and draw(st.booleans()) else d for o, d in pairs)]
    arrays = {"x": numbers(draw, x)}
    to = at_run_time(draw, asked, arrays, "s")
    return drawn(
        f"Expand to {asked}",
        lambda op, x, **given: op.Expand(x, to(op, given)),
        arrays,
        torch=lambda x, **_: x.expand((*front, *shape)),
    )


@DRAWS.of("Concat")
def concat(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3))
    axis = axis_of(draw, len(shape))
    arrays = {}
    for k in range(draw(st.integers(1, 3))):
        own = list(shape)
        own[axis] = draw(st.integers(1, 3))
        arrays[f"x{k}"] = numbers(draw, own)
    again = draw(st.booleans())

    def parts(xs: dict[str, Any]) -> list[Any]:
        return [*xs.values(), *([xs["x0"]] if again else [])]

    return drawn(
        f"Concat {axis} again={again}",
        lambda op, **xs: op.Concat(*parts(xs), axis=axis),
        arrays,
        torch=lambda **xs: torch.cat(parts(xs), axis),
    )


@DRAWS.of("Split")
def split(draw: Draw, operator: str) -> Case:
    """Some of the parts are used, each with a factor of its own."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    way = draw(st.sampled_from(["sizes", "equal", "count"]))
    if way == "equal":
        sizes = [sizes[0]] * len(sizes)
    if way == "count":  # the last one may be smaller
        sizes = [len(sizes)] * (len(sizes) - 1) + [draw(st.integers(1, len(sizes)))]
    shape = list(draw(shapes(1, 3)))
    axis = axis_of(draw, len(shape))
    shape[axis] = sum(sizes)
    count = len(sizes)
    used = draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1))
    arrays = {"x": numbers(draw, shape)}
    # Sizes as an input are known to nobody who wants to write the sum's cotangents.
    given = draw(st.booleans()) and way == "sizes"
    if given:
        arrays["s"] = np.array(sizes, np.int64)

    def formula(op: Any, x: Any, s: Any = None) -> Any:
        more: dict[str, Any] = {"axis": axis, "outputs": count}
        if way == "count" or (way == "equal" and op.opset >= 18):
            more["num_outputs"] = count
        known = [op.constant(sizes) if s is None else s] if way == "sizes" else []
        parts = op("Split", x, *known, **more)
        parts = [parts] if count == 1 and not isinstance(parts, (tuple, list)) else parts
        return _sum([op.ReduceSum(parts[k] * (k + 1.0) * parts[k], keepdims=0) for k in used])

    def in_torch(x: Any, **_: Any) -> Any:
        parts = torch.split(x, sizes, axis)
        return _sum([(parts[k] * (k + 1) * parts[k]).sum() for k in used])

    since = 18 if way == "count" else 13
    return drawn(f"Split {way} {sizes} {axis}", formula, arrays, since=since, torch=in_torch)


def _sum(parts: list[Any]) -> Any:
    return sum(parts[1:], parts[0])


@DRAWS.of("Slice")
def slices(draw: Draw, operator: str) -> Case:
    """Any start, end and step, also outside; some axes, in any order."""
    shape = draw(shapes(1, 3, side=5))
    axes = axes_of(draw, len(shape), smallest=1)
    plain = draw(st.booleans())
    if plain:
        axes = list(range(len(axes)))
    far = 2**40
    rows = []
    for _ in axes:
        step = draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
        start, end = (draw(st.integers(-7, 7) | st.sampled_from([far, -far])) for _ in range(2))
        rows.append((start, end, step))
    starts, ends, steps = (list(column) for column in zip(*rows, strict=True))
    arrays = {"x": numbers(draw, shape)}
    made = [at_run_time(draw, v, arrays, n) for n, v in (("a", starts), ("b", ends))]
    stepped = set(steps) != {1} or draw(st.booleans())
    tail = [] if plain and not stepped else [axes]
    tail += [steps] if stepped else []

    def formula(op: Any, x: Any, **given: Any) -> Any:
        return op.Slice(x, *(m(op, given) for m in made), *(op.constant(v) for v in tail))

    def in_torch(x: Any, **_: Any) -> Any:
        cut: list[Any] = [slice(None)] * x.ndim
        for axis, (start, end, step) in zip(axes, rows, strict=True):
            # Backwards the standard starts at the first element where Python starts before it.
            first = max(start, -x.shape[axis])
            cut[axis] = list(range(x.shape[axis]))[slice(first, end, step)]
        for axis, chosen in enumerate(cut):
            if isinstance(chosen, list):
                x = x.index_select(axis, torch.tensor(chosen, dtype=torch.int64))
        return x

    return drawn(f"Slice {axes} {rows}", formula, arrays, torch=in_torch)


@DRAWS.of("Pad")
def pad(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3, side=4, smallest=2))
    mode = draw(st.sampled_from(["constant", "constant", "edge", "reflect", "wrap"]))
    some = draw(st.booleans())
    axes = axes_of(draw, len(shape), smallest=1) if some else list(range(len(shape)))
    low, high = [], []
    for axis in axes:
        size = shape[axis]
        most = {"reflect": size - 1, "wrap": size}.get(mode, 3)
        least = 1 - size if mode == "constant" else 0
        before = draw(st.integers(least, most))
        low.append(before)
        high.append(draw(st.integers(max(least, least - before) if before < 0 else least, most)))
    arrays = {"x": numbers(draw, shape)}
    to = at_run_time(draw, [*low, *high], arrays, "p")
    value = draw(st.sampled_from(["none", "constant", "input"])) if mode == "constant" else "none"
    if value == "input":
        arrays["v"] = np.array(0.7)

    def formula(op: Any, x: Any, v: Any = None, **given: Any) -> Any:
        if value == "constant":
            v = op.constant(0.7, x.dtype)
        return op("Pad", x, to(op, given), v, *([op.constant(axes)] if some else []), mode=mode)

    def oracle(x: Any, v: Any = 0.7, **_: Any) -> Any:
        for axis, a, b in zip(axes, low, high, strict=True):
            n = x.shape[axis]
            cut = [slice(None)] * x.ndim
            cut[axis] = slice(max(-a, 0), n - max(-b, 0))
            x = x[tuple(cut)]
            sides = [(0, 0)] * x.ndim
            sides[axis] = (max(a, 0), max(b, 0))
            if mode == "constant":
                x = np.pad(x, sides, constant_values=0.0 if value == "none" else float(v))
            else:
                x = np.pad(x, sides, mode=mode)
        return x

    return drawn(
        f"Pad {mode} {axes} {low} {high} {value}",
        formula,
        arrays,
        since=19 if mode == "wrap" else 18 if some else 13,
        oracle=oracle,
    )


@DRAWS.of("Tile")
def tile(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3))
    repeats = [draw(st.integers(1, 3)) for _ in shape]
    arrays = {"x": numbers(draw, shape)}
    to = at_run_time(draw, repeats, arrays, "r")
    return drawn(
        f"Tile {repeats}",
        lambda op, x, **given: op.Tile(x, to(op, given)),
        arrays,
        torch=lambda x, **_: x.repeat(*repeats),
    )


@DRAWS.of("Trilu")
def triangle(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(2, 4))
    upper, k = draw(st.integers(0, 1)), draw(st.none() | st.integers(-3, 3))
    arrays = {"x": numbers(draw, shape)}
    if k is not None and draw(st.booleans()):
        arrays["k"] = np.array(k)

    def formula(op: Any, x: Any, k: Any = k) -> Any:
        rest = [] if k is None else [op.constant(k) if isinstance(k, int) else k]
        return op("Trilu", x, *rest, upper=upper)

    def in_torch(x: Any, **_: Any) -> Any:
        return (torch.triu if upper else torch.tril)(x, k or 0)

    return drawn(f"Trilu {upper} {k}", formula, arrays, since=14, torch=in_torch)


@DRAWS.of("DepthToSpace", "SpaceToDepth")
def blocks(draw: Draw, operator: str) -> Case:
    n, c, h, w, block = (draw(st.integers(1, 2)) for _ in range(5))
    mode = draw(st.sampled_from(["DCR", "CRD"]))
    deep = operator == "DepthToSpace"
    shape = (n, c * block**2, h, w) if deep else (n, c, h * block, w * block)
    options = {"blocksize": block} | ({"mode": mode} if deep else {})

    def in_torch(x: Any) -> Any:
        if deep and mode == "CRD":
            return torch.nn.functional.pixel_shuffle(x, block)
        if deep:
            parts = x.reshape(n, block, block, c, h, w).permute(0, 3, 4, 1, 5, 2)
            return parts.reshape(n, c, h * block, w * block)
        parts = x.reshape(n, c, h, block, w, block).permute(0, 3, 5, 1, 2, 4)
        return parts.reshape(n, c * block**2, h, w)

    return drawn(
        f"{operator} {options}",
        lambda op, x: op(operator, x, **options),
        {"x": numbers(draw, shape)},
        torch=in_torch,
    )


@DRAWS.of("CenterCropPad")
def center_crop_pad(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3, side=5))
    axes = draw(st.none() | st.just(axes_of(draw, len(shape), smallest=1)))
    target = [draw(st.integers(1, 6)) for _ in (shape if axes is None else axes)]

    def in_torch(x: Any) -> Any:
        for axis, want in zip(range(x.ndim) if axes is None else axes, target, strict=True):
            have = x.shape[axis]
            if want <= have:
                x = x.narrow(axis, (have - want) // 2, want)
            else:
                before = (want - have) // 2
                zeros = [
                    torch.zeros_like(x.narrow(axis, 0, 1)).repeat_interleave(many, axis)
                    for many in (before, want - have - before)
                ]
                x = torch.cat([zeros[0], x, zeros[1]], axis)
        return x

    return drawn(
        f"CenterCropPad {axes} {target}",
        lambda op, x: op.CenterCropPad(x, target, axes=axes),
        {"x": numbers(draw, shape)},
        since=18,
        torch=in_torch,
    )


@DRAWS.of("ReverseSequence")
def reverse_sequence(draw: Draw, operator: str) -> Case:
    time = draw(st.integers(0, 1))
    steps, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = ((steps, batch) if time == 0 else (batch, steps)) + draw(shapes(0, 2))
    lengths = [draw(st.integers(1, steps)) for _ in range(batch)]

    def in_torch(x: Any, n: Any) -> Any:
        rows = []
        for k, length in enumerate(lengths):
            row = x.select(1 - time, k)
            order = [*reversed(range(length)), *range(length, steps)]
            rows.append(row.index_select(0, torch.tensor(order)))
        return torch.stack(rows, 1 - time)

    return drawn(
        f"ReverseSequence {time} {lengths}",
        lambda op, x, n: op.ReverseSequence(x, n, time_axis=time, batch_axis=1 - time),
        {"x": numbers(draw, shape), "n": np.array(lengths, np.int64)},
        torch=in_torch,
    )
