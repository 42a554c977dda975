"""Rows of a client: a partition of common data, or the data of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ortflex_core import (
    Columns,
    DataError,
    DataSource,
    Parts,
    Pieces,
    Plugins,
    Recipe,
    read_if_small,
)

if TYPE_CHECKING:
    from flwr.app import Context


def partition_rows(data: Any, context: Context, *, seed: int = 0) -> Any:
    """The rows of one client of a simulation: row k of a permutation belongs to client k mod N.

    Args:
        data: ``(X, y)`` or ``(X, y, sample_weight)``, each an array or a mapping of arrays; or a
            data source, or Columns.
        context: the context of Flower, whose ``node_config`` has ``partition-id`` and ``num-partitions``.
        seed: the seed of the permutation.

    Returns:
        A tuple like the one given, or Columns.

    Raises:
        DataError: the node has no partition, there are fewer rows than clients, or the data does not
            fit into memory.

    >>> from types import SimpleNamespace
    >>> context = SimpleNamespace(node_config={"partition-id": 1, "num-partitions": 2})
    >>> X, y = partition_rows((np.arange(6).reshape(6, 1), np.arange(6)), context)
    >>> y
    array([1, 2, 4])
    """
    number, count = _place(context)
    loaded = data.load() if isinstance(data, DataSource) else data
    if isinstance(loaded, Pieces):
        loaded = read_if_small(loaded)
    if isinstance(loaded, Columns):
        return loaded.take(_rows(loaded.rows, number, count, seed))
    if not isinstance(loaded, tuple) or not loaded:
        raise DataError(
            "partition_rows: expected (X, y), (X, y, sample_weight), Columns or a data source that fits "
            f"into memory, got {type(loaded).__name__}; give each client its own file"
        )
    sizes = {len(array) for part in loaded for array in _arrays(part)}
    if len(sizes) != 1:
        raise DataError(
            f"partition_rows: the arrays have different numbers of rows: {sorted(sizes)}"
        )
    rows = _rows(sizes.pop(), number, count, seed)
    return tuple(_take(part, rows) for part in loaded)


def recipe_data(recipe: Recipe, plugins: Plugins | None = None) -> tuple[Any, Any]:
    """The data of a recipe and its validation data, which may be a fraction or None.

    Raises:
        ConfigError: a data source is unknown.
    """
    parts = Parts(Plugins.given(plugins).preferring(recipe.prefer))
    return parts.build("data", recipe.data), parts.build("validation", recipe.validation)


def _place(context: Context) -> tuple[int, int]:
    config = context.node_config
    try:
        number, count = int(config["partition-id"]), int(config["num-partitions"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "this node has no partition: its configuration has no numbers partition-id and num-partitions. "
            "The simulation sets them; a SuperNode gets them by --node-config "
            "'partition-id=0 num-partitions=3', or has data of its own"
        ) from error
    if not 0 <= number < count:
        raise DataError(f"partition-id is {number}, expected 0 to {count - 1} (num-partitions - 1)")
    return number, count


def _rows(rows: int, number: int, count: int, seed: int) -> np.ndarray[Any, Any]:
    if rows < count:
        raise DataError(f"{rows} rows cannot be divided among {count} clients; use fewer clients")
    return np.sort(np.random.default_rng(seed).permutation(rows)[number::count])


def _arrays(part: Any) -> list[Any]:
    if part is None:
        return []
    return list(part.values()) if isinstance(part, Mapping) else [part]


def _take(part: Any, rows: np.ndarray[Any, Any]) -> Any:
    if part is None:
        return None
    if isinstance(part, Mapping):
        return {name: np.asarray(array)[rows] for name, array in part.items()}
    return np.asarray(part)[rows]
