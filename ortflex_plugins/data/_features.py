"""Shared by tables: features that are categories, booleans, dates or strings, and missing values."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core import Array, DataError, is_number, short_repr, suggest

KINDS = ("number", "category", "boolean", "date", "year", "string", "unused")
"""What a column may be; a list of names is a category with these codes."""
_FLAGS = {"true": 1.0, "yes": 1.0, "1": 1.0, "false": 0.0, "no": 0.0, "0": 0.0}
_DAY_2000 = 10957
"""2000-01-01 in days since 1970-01-01."""
_FEW = 20
"""The number of different strings up to which a column counts as one of categories."""

Kind = str | Sequence[str]
Fill = float | str | Mapping[str, float | str] | None
Number = Callable[[Any], float]
"""A cell as a number; raises ValueError or TypeError."""


def check_fill(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validator: 'median', a number, or one of them for each column."""
    values = value.values() if isinstance(value, Mapping) else [value]
    for one in values:
        if not (is_number(one) or (one is None and value is None) or one == "median"):
            where = f"{type(instance).__name__}.{attribute.name}"
            raise ValueError(f"{where} must be 'median' or a number, got {short_repr(one)}")


def is_kind(value: object) -> bool:
    """Whether a value says what a column is: one of :data:`KINDS`, or the names of categories."""
    if isinstance(value, list | tuple):
        return all(isinstance(name, str) for name in value)
    return isinstance(value, str) and value in KINDS


def check_kinds(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validator: a list of columns, or what each column is."""
    for column, kind in value.items() if isinstance(value, Mapping) else ():
        if not is_kind(kind):
            raise ValueError(
                f"{type(instance).__name__}.{attribute.name}.{column} must be "
                f"{', '.join(map(repr, KINDS))} or a list of categories, got {kind!r}"
            )


def kinds_of(columns: Any) -> dict[str, Kind]:
    """What columns are, of a parameter ``columns`` that may list features or name inputs, too."""
    given = columns if isinstance(columns, Mapping) else {}
    return {name: what for name, what in given.items() if is_kind(what)}


@attrs.frozen
class Features:
    """What the columns of features are, and what replaces their missing values.

    >>> features = Features({"city": "category"}, None)
    >>> known = features.found(["city"], lambda column: ["Rom", "Bern", "Rom"])
    >>> known.kinds, known.encode("city", ["Bern", "Rom"], "table").tolist()
    ({'city': ('Bern', 'Rom')}, [0.0, 1.0])
    """

    kinds: Mapping[str, Kind]
    fill: Fill

    def kind(self, column: str) -> Kind:
        """What a column is; ``number`` by default."""
        return self.kinds.get(column, "number")

    def fill_of(self, column: str) -> float | str | None:
        """What replaces the missing values of a column; None for an error."""
        return self.fill.get(column) if isinstance(self.fill, Mapping) else self.fill

    @property
    def unused(self) -> set[str]:
        """The columns that are left out; a table may lack them."""
        return {column for column, kind in self.kinds.items() if kind == "unused"}

    @property
    def wants_median(self) -> bool:
        """Whether a median is still to be computed."""
        return "median" in (self.fill.values() if isinstance(self.fill, Mapping) else (self.fill,))

    def unknown(self, column: str) -> bool:
        """Whether the values of a column have to be looked at first, for its categories or its median."""
        kind = self.kind(column)
        return kind == "category" or (kind == "number" and self.fill_of(column) == "median")

    def found(
        self,
        columns: Iterable[str],
        values: Callable[[str], Sequence[Any]],
        number: Number = float,
        like: Features | None = None,
    ) -> Features:
        """The same with the names of categories and the medians; ``like`` has those of the training."""
        theirs = {} if like is None else like.kinds
        kinds = {
            column: theirs.get(column, categories(values(column))) if kind == "category" else kind
            for column, kind in self.kinds.items()
        }
        fill = self.fill
        if self.wants_median and like is not None and isinstance(like.fill, Mapping):
            fill = like.fill
        elif self.wants_median:
            given = self.fill if isinstance(self.fill, Mapping) else {}
            fill = {name: value for name, value in given.items() if value != "median"}
            for column in columns:
                if self.fill_of(column) != "median" or self.kind(column) != "number":
                    continue
                cells = values(column)
                if any(map(is_missing, cells)):
                    fill[column] = median(column, cells, number)
        return Features(kinds, fill)

    def encode(
        self,
        column: str,
        values: Sequence[Any],
        where: str,
        number: Number = float,
        place: Callable[[int], str] = "row {}".format,
        *,
        given: Callable[[int], Any] | None = None,
        advice: Callable[[Any], str] | None = None,
    ) -> Array:
        """A column as float32, or as strings; None stands for a missing value.

        For messages, ``where`` is the table, ``place`` the place of a row, ``given`` what the table has in
        a row, and ``advice`` a hint about a cell that is no number.

        Raises:
            DataError: a value is missing or is not what the column is.
        """
        kind, fill = self.kind(column), self.fill_of(column)
        if kind == "category":
            kind = categories(values)
        if fill == "median":
            fill = median(column, values, number) if kind == "number" else None
        if kind == "string":
            fill = "" if fill is None else str(fill)
            return np.array([fill if is_missing(v) else str(v) for v in values], object)
        codes = None if isinstance(kind, str) else {n: float(k) for k, n in enumerate(kind)}
        out = np.empty(len(values), np.float32)
        for row, value in enumerate(values):
            known: Any = fill
            if not is_missing(value):
                known = _value(value, str(kind), number) if codes is None else codes.get(str(value))
            if known is None:
                spot = f"{where}, {place(row)}, column {column!r}"
                shown = value if given is None else given(row)
                hint = "" if advice is None or kind != "number" else advice(value)
                raise DataError(f"{spot}: {_odd(column, kind, value, shown, hint)}")
            out[row] = known
        return out


def _odd(column: str, kind: Kind, value: Any, shown: Any, advice: str) -> str:
    if is_missing(value):
        return (
            f"expected a number, got {shown!r}, a missing value; replace such features with "
            "fill = 'median' or a number, or remove the row"
        )
    if not isinstance(kind, str):
        return f"expected a category that is known, got {value!r}; {suggest(str(value), kind)}"
    if kind in ("date", "year"):
        return f"expected a date as 2024-12-31, got {value!r}"
    if kind == "boolean":
        return f"expected true or false, got {value!r}"
    of_dates = isinstance(value, datetime.date)
    advice = advice or (
        f"columns = {{ {column} = {'year' if of_dates else 'category'!r} }} makes "
        f"{'dates' if of_dates else 'names'} numbers, {column} = 'unused' leaves it out"
    )
    return f"expected a number, got {value!r}; {advice}"


def is_missing(value: object) -> bool:
    """Whether a cell has no value: None, or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def categories(values: Iterable[Any]) -> tuple[str, ...]:
    """The different values of a column as strings, sorted."""
    return tuple(sorted({str(value) for value in values if not is_missing(value)}))


def median(column: str, values: Iterable[Any], number: Number = float) -> float:
    """The median of the numbers of a column.

    Raises:
        DataError: it has none.
    """
    found = [_value(value, "number", number) for value in values if not is_missing(value)]
    known = [value for value in found if value is not None]
    if not known:
        raise DataError(f"the column {column!r} has no number, so it has no median")
    return float(np.median(known))


def guessed(values: Iterable[Any], number: Number = float) -> str:
    """What a column seems to be; ``number`` if no other kind fits all values."""
    known = [value for value in values if not is_missing(value)]
    for kind in ("number", "boolean", "year"):
        if all(_value(value, kind, number) is not None for value in known):
            return kind
    few = len({str(value) for value in known}) <= max(_FEW, len(known) // 10)
    return "category" if few else "number"


def _value(value: Any, kind: str, number: Number) -> float | None:
    """A cell as a number of this kind; None if it is not."""
    try:
        if kind == "boolean":
            return _FLAGS.get(str(value).lower())
        if kind == "date":
            return _days(value)
        if kind == "year":
            return (_days(value) - _DAY_2000) / 365.25
        return number(value)
    except (ValueError, TypeError, OverflowError):
        return None


def _days(value: Any) -> float:
    """The days since 1970-01-01 of a date, a time or a string in the form of ISO 8601."""
    if isinstance(value, np.datetime64):
        return float((value - np.datetime64(0, "D")) / np.timedelta64(1, "D"))
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value)
    if not isinstance(value, datetime.datetime):
        if not isinstance(value, datetime.date):
            raise TypeError(f"expected a date, got {value!r}")
        value = datetime.datetime(value.year, value.month, value.day)
    return float(value.replace(tzinfo=value.tzinfo or datetime.UTC).timestamp() / 86400)


def padded(
    lists: Sequence[Any], value: float | None, length: int | None, where: str, key: str = "pad"
) -> Array:
    """Lists of numbers as the rows of one array, the shorter ones filled at their ends.

    >>> padded([[1, 2], [3]], 0, None, "tokens").tolist()
    [[1, 2], [3, 0]]

    Raises:
        DataError: lists differ in length and there is no ``value``, one is longer than ``length``, or a
            row has no list of numbers.
    """
    rows = [None if one is None else np.asarray(one) for one in lists]
    odd = next(
        (k for k, row in enumerate(rows) if row is None or row.dtype.kind not in "iufb"), None
    )
    if odd is not None:
        raise DataError(
            f"{where}: row {odd} has {short_repr(lists[odd])}, expected a list of numbers"
        )
    arrays = [row for row in rows if row is not None]
    if len({row.shape for row in arrays}) == 1 and (value is None or length is None):
        return np.stack(arrays)
    if value is None:
        first = arrays[0].shape
        other = next(k for k, row in enumerate(arrays) if row.shape != first)
        raise DataError(
            f"{where}: the list of row {other} has the shape {list(arrays[other].shape)}, that of row 0 "
            f"{list(first)}; {key} = 0 fills the shorter lists with zeros"
        )
    if any(row.ndim != 1 for row in arrays):
        raise DataError(f"{where}: {key} fills lists of numbers, not lists of lists")
    most = max(map(len, arrays), default=0) if length is None else length
    long = next((k for k, row in enumerate(arrays) if len(row) > most), None)
    if long is not None:
        raise DataError(
            f"{where}: the list of row {long} has {len(arrays[long])} values, more than length = {most}; "
            "set a larger length, or cut the lists"
        )
    kind = np.result_type(*(row.dtype for row in arrays))
    if kind.kind != "f" and value != int(value):
        kind = np.result_type(kind, np.float32)
    out = np.full((len(arrays), most), value, kind)
    for k, row in enumerate(arrays):
        out[k, : len(row)] = row
    return out
