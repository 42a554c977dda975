"""Draws of reductions, softmax and running sums and products."""

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
    torch,
)

DRAWS = Draws()
INT64 = 7

TORCH = {
    "ReduceSum": lambda x, a, k: x.sum(a, k),
    "ReduceMean": lambda x, a, k: x.mean(a, k),
    "ReduceMax": lambda x, a, k: x.amax(a, k),
    "ReduceMin": lambda x, a, k: x.amin(a, k),
    "ReduceL1": lambda x, a, k: x.abs().sum(a, k),
    "ReduceL2": lambda x, a, k: (x * x).sum(a, k).sqrt(),
    "ReduceSumSquare": lambda x, a, k: (x * x).sum(a, k),
    "ReduceLogSum": lambda x, a, k: x.sum(a, k).log(),
    "ReduceLogSumExp": lambda x, a, k: torch.logsumexp(x, a, k),
    "ReduceProd": lambda x, a, k: _product(x, a, k),
}


def _product(x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


@DRAWS.of(*TORCH)
def reduction(draw: Draw, operator: str) -> Case:
    """Axes as an attribute or an input, of constants or known at run time; or none: all of them."""
    shape = draw(shapes(high=4))
    rank, keep = len(shape), draw(st.integers(0, 1))
    x = numbers(draw, shape, 0.5 if operator == "ReduceLogSum" else -2.0)
    if operator == "ReduceProd" and x.size:
        flat = x.reshape(-1)
        for k in draw(st.lists(st.integers(0, x.size - 1), max_size=2)):
            flat[k] = 0.0
    sometimes = 13 if operator == "ReduceSum" else 18
    way = draw(st.sampled_from(["all", "constant", "run time", "none"]))
    axes = axes_of(draw, rank, smallest=1) if rank and way not in ("all", "none") else []
    if not axes and way != "none":
        way = "all"
    arrays, options = {"x": x}, {"keepdims": keep}
    if way == "run time":
        arrays["axes"] = np.array(axes, np.int64)

    def formula(op: Any, x: Any, axes: Any = axes) -> Any:
        if way == "none":
            return op(operator, x, op.constant([], INT64), noop_with_empty_axes=1, **options)
        if way == "run time":
            return op(operator, x, axes, **options)
        return op(operator, x, **({} if way == "all" else {"axes": axes}), **options)

    def in_torch(x: Any, **_: Any) -> Any:
        if x.ndim == 0 or way == "none":  # every element by itself
            return TORCH[operator](x[None], (0,), False)
        return TORCH[operator](x, tuple(axes or range(rank)), bool(keep))

    return drawn(
        f"{operator} {way} {axes} {options}",
        formula,
        arrays,
        since=sometimes if way in ("none", "run time") else 13,
        torch=in_torch,
        # onnxruntime 1.16 computes these in float32 inside.
        reference=operator in ("ReduceL1", "ReduceL2", "ReduceLogSum"),
    )


@DRAWS.of("Softmax", "LogSoftmax")
def softmax(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 4))
    axis, scale = axis_of(draw, len(shape)), draw(st.sampled_from([1, 10]))
    options = draw(st.sampled_from([{}, {"axis": axis}]))
    function = "softmax" if operator == "Softmax" else "log_softmax"
    return drawn(
        f"{operator} {options}",
        lambda op, x: op(operator, x, **options),
        {"x": scale * numbers(draw, shape)},
        torch=lambda x: getattr(torch, function)(x, options.get("axis", -1)),
    )


def running(x: Any, axis: int, exclusive: int, reverse: int, product: bool) -> Any:
    """Running sums or products in torch."""
    if reverse:
        x = x.flip(axis)
    if exclusive:
        first = torch.full_like(x.narrow(axis, 0, 1), 1.0 if product else 0.0)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    y = torch.cumprod(x, axis) if product else torch.cumsum(x, axis)
    return y.flip(axis) if reverse else y


@DRAWS.of("CumSum", "CumProd")
def cumulative(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3, side=4))
    axis = axis_of(draw, len(shape))
    way = {"exclusive": draw(st.integers(0, 1)), "reverse": draw(st.integers(0, 1))}
    x = numbers(draw, shape)
    if operator == "CumProd":
        flat = x.reshape(-1)
        for k in draw(st.lists(st.integers(0, x.size - 1), max_size=3)):
            flat[k] = 0.0
    arrays = {"x": x}
    if draw(st.booleans()):
        arrays["axis"] = np.array(axis)
    return drawn(
        f"{operator} {axis} {way}",
        lambda op, x, axis=axis: op(
            operator, x, op.constant(axis) if isinstance(axis, int) else axis, **way
        ),
        arrays,
        since=13 if operator == "CumSum" else 26,
        torch=lambda x, **_: running(x, axis, **way, product=operator == "CumProd"),
    )
