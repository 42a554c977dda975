"""Draws of the operators that read or write at given places."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np

from ortflex_core import Array
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import Draw, Draws, axis_of, drawn, numbers, random, shapes, torch

DRAWS = Draws()


def places(draw: Draw, shape: Any, size: int) -> Array:
    """Places on an axis, some counted from its end, repeated ones too."""
    found: Array = random(draw).integers(-size, size, tuple(shape))
    return found


@DRAWS.of("Gather")
def gather(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3))
    axis = axis_of(draw, len(shape))
    index = places(draw, draw(shapes(0, 2)), shape[axis])

    def in_torch(x: Any, i: Any) -> Any:
        at = axis % x.ndim
        flat = x.index_select(at, (i % x.shape[at]).reshape(-1))
        return flat.reshape((*x.shape[:at], *i.shape, *x.shape[at + 1 :]))

    return drawn(
        f"Gather {axis} {index.tolist()}",
        lambda op, x, i: op.Gather(x, i, axis=axis),
        {"x": numbers(draw, shape), "i": index},
        torch=in_torch,
    )


def along(draw: Draw) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """A shape, an axis, and a shape of indices that fits into it."""
    shape = draw(shapes(1, 3))
    axis = axis_of(draw, len(shape))
    index = tuple(
        draw(st.integers(1, 4 if k == axis % len(shape) else d)) for k, d in enumerate(shape)
    )
    return shape, axis, index


@DRAWS.of("GatherElements")
def gather_elements(draw: Draw, operator: str) -> Case:
    shape, axis, size = along(draw)
    index = places(draw, size, shape[axis])
    return drawn(
        f"GatherElements {axis} {index.tolist()}",
        lambda op, x, i: op.GatherElements(x, i, axis=axis),
        {"x": numbers(draw, shape), "i": index},
        torch=lambda x, i: torch.gather(x, axis, i % shape[axis]),
    )


def reductions(draw: Draw) -> tuple[str, int]:
    """A reduction and the opset that brought it."""
    return draw(  # type: ignore[no-any-return]
        st.sampled_from([("none", 13), ("add", 16), ("mul", 16), ("max", 18), ("min", 18)])
    )


def written(
    x: Array, u: Array, cells: list[tuple[tuple[int, ...], tuple[int, ...]]], how: str
) -> Array:
    """Elements of ``u`` put into ``x``: pairs of a place there and a place here."""
    y = x.copy()
    for to, origin in cells:
        old, new = y[to], u[origin]
        ways = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
        y[to] = ways[how](old, new) if how in ways else new
    return y


@DRAWS.of("ScatterElements")
def scatter_elements(draw: Draw, operator: str) -> Case:
    shape, axis, size = along(draw)
    how, since = reductions(draw)
    if how == "none":  # a place written twice has no defined value
        size = tuple(min(a, b) for a, b in zip(size, shape, strict=True))
        lines = random(draw).permuted(
            np.broadcast_to(np.arange(shape[axis]), (*np.delete(size, axis), shape[axis])), axis=-1
        )
        index = np.moveaxis(lines, -1, axis).take(range(size[axis]), axis=axis)
    else:
        index = places(draw, size, shape[axis])
    x, u = numbers(draw, shape), numbers(draw, size, salt=1)
    if how == "mul" and draw(st.booleans()):
        u.reshape(-1)[:: draw(st.integers(1, 3))] = 0.0
    cells = []
    for origin in np.ndindex(*size):
        to = list(origin)
        to[axis] = int(index[origin]) % shape[axis]
        cells.append((tuple(to), origin))
    options = {} if how == "none" else {"reduction": how}
    return drawn(
        f"ScatterElements {axis} {how} {index.tolist()}",
        lambda op, x, i, u: op.ScatterElements(x, i, u, axis=axis, **options),
        {"x": x, "i": index, "u": u},
        since=since,
        oracle=lambda x, i, u: written(x, u, cells, how),
    )


@DRAWS.of("GatherND")
def gather_nd(draw: Draw, operator: str) -> Case:
    batch = draw(shapes(0, 1))
    rest = draw(shapes(1, 3))
    x = numbers(draw, (*batch, *rest))
    depth = draw(st.integers(1, len(rest)))
    front = draw(shapes(0, 2))
    columns = [places(draw, (*batch, *front), d) for d in rest[:depth]]
    index = np.stack(columns, axis=-1)
    dims = len(batch)

    def in_torch(x: Any, i: Any) -> Any:
        at = [i[..., k] % d for k, d in enumerate(rest[:depth])]
        if dims:
            rows = torch.arange(batch[0]).reshape(-1, *[1] * len(front))
            at = [rows.expand(at[0].shape), *at]
        return x[tuple(at)]

    return drawn(
        f"GatherND {dims} {index.tolist()}",
        lambda op, x, i: op.GatherND(x, i, batch_dims=dims),
        {"x": x, "i": index},
        torch=in_torch,
    )


@DRAWS.of("ScatterND")
def scatter_nd(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3))
    depth = draw(st.integers(1, len(shape)))
    how, since = reductions(draw)
    slots = list(np.ndindex(*shape[:depth]))
    if how == "none":
        count = draw(st.integers(1, len(slots)))
        chosen = random(draw).permutation(len(slots))[:count]
    else:
        chosen = random(draw).integers(0, len(slots), draw(st.integers(1, 4)))
    index = np.array([slots[k] for k in chosen], np.int64)
    if draw(st.booleans()):  # the same place counted from the ends
        index = index - np.array(shape[:depth])
    if draw(st.booleans()):
        index = index[:, None]
    x, u = numbers(draw, shape), numbers(draw, (*index.shape[:-1], *shape[depth:]), salt=1)
    if how == "mul" and draw(st.booleans()):
        u.reshape(-1)[:: draw(st.integers(1, 3))] = 0.0
    cells = [
        ((*slots[k], *rest), (row, *([0] * (index.ndim - 2)), *rest))
        for row, k in enumerate(chosen)
        for rest in np.ndindex(*shape[depth:])
    ]
    options = {} if how == "none" else {"reduction": how}
    return drawn(
        f"ScatterND {how} {index.tolist()}",
        lambda op, x, i, u: op.ScatterND(x, i, u, **options),
        {"x": x, "i": index, "u": u},
        since=since,
        oracle=lambda x, i, u: written(x, u, cells, how),
    )


@DRAWS.of("OneHot")
def one_hot(draw: Draw, operator: str) -> Case:
    shape, depth = draw(shapes(1, 2)), draw(st.integers(1, 4))
    index = random(draw).integers(-depth, depth, shape)
    axis = draw(st.integers(-len(shape) - 1, len(shape)))

    def in_torch(i: Any, v: Any) -> Any:
        hot = torch.nn.functional.one_hot(i % depth, depth).movedim(-1, axis)
        return torch.where(hot > 0, v[1], v[0])

    return drawn(
        f"OneHot {axis} {index.tolist()}",
        lambda op, i, v: op.OneHot(i, depth, v, axis=axis),
        {"i": index, "v": numbers(draw, (2,))},
        torch=in_torch,
    )


@DRAWS.of("Range")
def range_(draw: Draw, operator: str) -> Case:
    count, sign = draw(st.integers(1, 5)), draw(st.sampled_from([-1, 1]))
    arrays = {"a": numbers(draw, ()), "d": sign * numbers(draw, (), 0.2, 0.4)}
    return drawn(
        f"Range {count}",
        lambda op, a, d: op.Range(a, a + (count - 0.5) * d, d),
        arrays,
        torch=lambda a, d: a + torch.arange(count) * d,
    )


@DRAWS.of("TopK")
def top_k(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3, side=4))
    axis = axis_of(draw, len(shape))
    k, largest = draw(st.integers(1, shape[axis])), draw(st.integers(0, 1))
    return drawn(
        f"TopK {k} {axis} {largest}",
        lambda op, x: op("TopK", x, [k], axis=axis, largest=largest, outputs=2)[0],
        {"x": numbers(draw, shape)},
        torch=lambda x: torch.topk(x, k, axis, bool(largest)).values,
    )


@DRAWS.of("Compress")
def compress(draw: Draw, operator: str) -> Case:
    """The list of choices may be shorter than the axis."""
    shape = draw(shapes(1, 3))
    axis = draw(st.none() | st.just(axis_of(draw, len(shape))))
    size = int(np.prod(shape)) if axis is None else shape[axis]
    chosen = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=size)))
    options = {} if axis is None else {"axis": axis}
    return drawn(
        f"Compress {axis} {chosen.tolist()}",
        lambda op, x, c: op.Compress(x, c, **options),
        {"x": numbers(draw, shape), "c": chosen},
        torch=lambda x, c: (x.reshape(-1) if axis is None else x).index_select(
            axis or 0, c.nonzero()[:, 0]
        ),
    )


@DRAWS.of("Unique")
def unique(draw: Draw, operator: str) -> Case:
    """All elements differ: equal ones have no slope by themselves."""
    shape = draw(shapes(1, 3))
    axis = draw(st.none() | st.just(axis_of(draw, len(shape))))
    options: dict[str, Any] = {"sorted": draw(st.integers(0, 1))}
    options |= {} if axis is None else {"axis": axis}
    weights = 1.0 + np.arange(int(np.prod(shape)), dtype=np.float32)

    def formula(op: Any, x: Any) -> Any:
        y = op("Unique", x, **options)
        flat = op.Reshape(y, [-1]) * op.constant(weights, x.dtype)
        return op.ReduceSum(flat, keepdims=0)

    def oracle(x: Array) -> Array:
        if options["sorted"]:
            x = np.unique(x, axis=axis)
        return np.asarray((x.reshape(-1) * weights).sum())

    return drawn(f"Unique {options}", formula, {"x": numbers(draw, shape)}, oracle=oracle)


@DRAWS.of("TensorScatter")
def tensor_scatter(draw: Draw, operator: str) -> Case:
    mode = draw(st.sampled_from(["linear", "circular"]))
    batch, rank = draw(st.integers(1, 2)), draw(st.integers(2, 4))
    shape = [batch, *(draw(st.integers(1, 3)) for _ in range(rank - 1))]
    axis = draw(st.integers(1, rank - 1))
    update = list(shape)
    shape[axis] = draw(st.integers(1, 4))
    update[axis] = draw(st.integers(1, shape[axis]))
    most = shape[axis] - (update[axis] if mode == "linear" else 1)
    starts = [draw(st.integers(0, most)) for _ in range(batch)]
    given = draw(st.booleans())
    arrays = {"x": numbers(draw, shape), "u": numbers(draw, update, salt=1)}
    if given:
        arrays["i"] = np.array(starts)
    named = axis - rank if draw(st.booleans()) else axis

    def oracle(x: Array, u: Array, i: Any = None) -> Array:
        y = x.copy()
        for b in range(batch):
            for k in range(update[axis]):
                to: list[Any] = [b, *[slice(None)] * (rank - 1)]
                source = list(to)
                to[axis], source[axis] = ((starts[b] if given else 0) + k) % shape[axis], k
                y[tuple(to)] = u[tuple(source)]
        return y

    return drawn(
        f"TensorScatter {mode} {named} {starts if given else None}",
        lambda op, x, u, i=None: op("TensorScatter", x, u, i, axis=named, mode=mode),
        arrays,
        since=24,
        needs_rank=True,
        oracle=oracle,
    )
