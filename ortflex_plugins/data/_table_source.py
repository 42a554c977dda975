"""What sources of tables have in common: the columns of labels and weights, missing values, lists."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import attrs

from ortflex_core import DataSource, setting
from ortflex_plugins.data._columns import rows_or_none
from ortflex_plugins.data._features import check_fill


@attrs.frozen(kw_only=True)
class TableSource(DataSource, abc.ABC):
    """A table with columns of features, labels and weights."""

    target: str | Sequence[str] | Mapping[str, str] = setting(
        default="y", help="the label column, a list of columns, or {label = column}"
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
        validator=rows_or_none,
        help="the length to which lists are padded if pad is set; by default, the length of the "
        "longest list",
    )
