"""Shared by data sources: what arrays and columns are, inputs, labels or sample weights."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ortflex_core import (
    MOST,
    Array,
    Columns,
    DataError,
    DataSource,
    expected_count,
    is_count,
    satisfying,
    setting,
    suggest,
)
from ortflex_plugins.data._features import check_fill

DEFAULT_WEIGHT = "sample_weight"
"""The default name of sample weights. An array of this name is optional in a file; any other name is
required."""

Names = str | Mapping[str, str]
"""A name in the file, or a mapping from the name in ortflex to the name in the file."""


def count_or_none(most: int = MOST) -> Any:
    """A validator of a number of rows, or of bytes, or None."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and not is_count(value, 1, most):
            where = f"{type(instance).__name__}.{attribute.name}"
            raise ValueError(f"{where}: {expected_count(value, 1, most)}")

    return check


def sort_columns(
    arrays: Mapping[str, Array], target: Names, weight: Names | None, where: str
) -> Columns:
    """Columns with the labels and weights that are named; all other arrays are inputs.

    Raises:
        DataError: a name does not exist, no array is left for the inputs, or arrays have different
            lengths.

    >>> import numpy as np
    >>> columns = sort_columns({"X": np.zeros((2, 3)), "y": np.ones(2)}, "y", None, "data.npz")
    >>> list(columns.inputs), list(columns.labels), columns.rows
    (['X'], ['y'], 2)
    """
    labels = {"y": target} if isinstance(target, str) else dict(target)
    weights = _weights(arrays, weight)
    for parameter, names in (("target", labels), ("weight", weights)):
        what = {"target": "labels", "weight": "sample weights"}[parameter]
        for name in names.values():
            if name not in arrays:
                raise DataError(
                    f"{where}: the {what} are read from {name!r}, but there is no such array; "
                    f'choose one, for example data = {{ path = …, {parameter} = "…" }}; '
                    f"{suggest(name, arrays)}"
                )
    taken = {*labels.values(), *weights.values()}
    inputs = {name: array for name, array in arrays.items() if name not in taken}
    if not inputs:
        raise DataError(
            f"{where}: no column is left for the model's inputs; all are labels or weights: "
            f"{', '.join(sorted(taken))}. Labels that repeat an input are a second array of the file"
        )
    for name, array in arrays.items():
        if array.ndim == 0:
            raise DataError(f"{where}: {name!r} is a single value, expected at least one row")
    columns = Columns(
        inputs=inputs,
        labels={name: arrays[source] for name, source in labels.items()},
        weights={name: arrays[source] for name, source in weights.items()},
    )
    try:
        rows = columns.rows
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if not rows:
        raise DataError(f"{where}: the data are empty: 0 rows")
    return columns


def _weights(arrays: Mapping[str, Array], weight: Names | None) -> dict[str, str]:
    if weight is None or (weight == DEFAULT_WEIGHT and weight not in arrays):
        return {}
    return {DEFAULT_WEIGHT: weight} if isinstance(weight, str) else dict(weight)


@attrs.frozen(kw_only=True)
class TableSource(DataSource, abc.ABC):
    """A table with columns of features, labels and weights."""

    target: str | Sequence[str] | Mapping[str, str] = setting(
        default="y",
        validator=satisfying(
            "must name a column; {} means that there are no labels",
            lambda v: not isinstance(v, list | tuple) or len(v) > 0,
        ),
        help="the label column, a list of columns, or {label = column}",
    )
    weight: str | None = setting(default=None, help="the column of sample weights")
    fill: float | str | Mapping[str, float | str] | None = setting(
        default=None,
        validator=check_fill,
        help="the replacement for missing features: 'median', a number, or {column = …}; without "
        "it, a missing feature is an error, except in columns of strings",
    )
    input: str = setting(
        default="X",
        help="the model input that receives the columns; X works for any model with one input",
    )

    @property
    def _targets(self) -> list[str]:
        """The columns of labels."""
        if isinstance(self.target, str):
            return [self.target]
        return list(self.target.values() if isinstance(self.target, Mapping) else self.target)


@attrs.frozen(kw_only=True)
class ListTableSource(TableSource, abc.ABC):
    """A table whose cells may be lists."""

    pad: float | None = setting(
        default=None,
        help="the value that is appended to shorter lists; without it, all lists of a column must "
        "have the same length",
    )
    length: int | None = setting(
        default=None,
        validator=count_or_none(),
        help="the length to which lists are padded if pad is set; by default, the length of the "
        "longest list",
    )
