"""Operators that read or write elements by index."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_plugins.operators.calls import Call, Table, Value, along, axis_of

TABLE = Table()


def _wrapped(c: Call, index: Value, size: int) -> Value:
    """Indices counted from the front."""
    if isinstance(index, np.ndarray):
        return np.where(index < 0, index + size, index)
    return index if index.dtype.kind == "u" else c.xp.where(index < 0, index + size, index)


@TABLE("Gather")
def _gather(c: Call, x: Value, index: Value) -> Value:
    axis = axis_of(c.get("axis", 0), x.ndim)
    return c.forms.take(x, _wrapped(c, index, x.shape[axis]), axis)


def _grid(c: Call, index: Value, axis: int) -> tuple[Any, ...]:
    """The full index of every element of ``index``, which replaces the position along an axis."""
    places = [along(np.arange(n), k, index.ndim) for k, n in enumerate(index.shape)]
    places[axis] = index
    return tuple(places)


@TABLE("GatherElements")
def _gather_elements(c: Call, x: Value, index: Value) -> Value:
    axis = axis_of(c.get("axis", 0), x.ndim)
    return x[_grid(c, _wrapped(c, index, x.shape[axis]), axis)]


@TABLE("ScatterElements", "Scatter")
def _scatter_elements(c: Call, x: Value, index: Value, updates: Value) -> Value:
    axis = axis_of(c.get("axis", 0), x.ndim)
    places = _grid(c, _wrapped(c, index, x.shape[axis]), axis)
    return c.forms.scatter(x, places, updates, c.get("reduction", "none"))


def _last(c: Call, x: Value, index: Value, first: int) -> tuple[Any, ...]:
    """The components along the last axis of ``index``, for the axes of ``x`` from ``first`` on."""
    return tuple(_wrapped(c, index[..., k], x.shape[first + k]) for k in range(index.shape[-1]))


@TABLE("GatherND")
def _gather_nd(c: Call, x: Value, index: Value) -> Value:
    front = c.get("batch_dims", 0)
    grid = [along(np.arange(x.shape[k]), k, index.ndim - 1) for k in range(front)]
    return x[(*grid, *_last(c, x, index, front))]


@TABLE("ScatterND")
def _scatter_nd(c: Call, x: Value, index: Value, updates: Value) -> Value:
    return c.forms.scatter(x, _last(c, x, index, 0), updates, c.get("reduction", "none"))


@TABLE("OneHot")
def _one_hot(c: Call, index: Value, depth: Value, values: Value) -> Value:
    count = int(c.known(depth, "depth").item())
    axis = axis_of(c.get("axis", -1), index.ndim + 1)
    own = c.xp.expand_dims(index, axis)
    own = c.xp.where(own < 0, own + count, own)
    hot = own == along(np.arange(count), axis, index.ndim + 1).astype(own.dtype)
    return c.xp.where(hot, values[1], values[0])
