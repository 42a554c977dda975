"""The data source ``csv``: a table of comma-separated values."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import Array, Columns, DataError, DataSource, lines, open_text, setting, suggest
from ortflex_plugins.data._columns import DEFAULT_WEIGHT

_LONGEST = 1000
"""The largest number of characters of a class name, because an array of strings uses it for every row."""


def _one_character(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or len(value) != 1 or value in '\n\r"':
        raise ValueError(f"Csv.{attribute.name} must be one character, got {value!r}")


@attrs.frozen(kw_only=True)
class Csv(DataSource):
    r"""A table in a csv file: one row per line, with or without a header.

    The features become one float32 input of shape [rows, columns]. If ``target`` is a name, labels have
    the shape [rows] and are int64 if all are integers, float32 if all are numbers, or else strings. If it
    is a list of names, labels are float32 of shape [rows, names] (``["y"]`` for a model whose output is
    [rows, 1]). If it is a mapping, there are several labels by name, and none for ``{}``. Without a
    header, columns are named ``0``, ``1``, and so on. Empty lines are skipped.

    Raises:
        DataError: the file or a column does not exist, there is no header, two columns have one name, a
            line has another number of fields, or a field is not a number; the error names line and
            column.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "data.csv").write_text("a,b,kind\n1,2,cat\n3,4,dog\n")
    ...     columns = Csv(path=f"{folder}/data.csv", target="kind").load()
    >>> columns.inputs["X"].tolist(), columns.labels["y"].tolist()
    ([[1.0, 2.0], [3.0, 4.0]], ['cat', 'dog'])

    Source: RFC 4180, with any delimiter.
    """

    name: ClassVar[str] = "csv"

    path: str = setting(help="the file, in UTF-8")
    target: str | Sequence[str] | Mapping[str, str] = setting(
        default="y", help="the column of labels, a list of columns, or {label = column}"
    )
    weight: str | None = setting(default=None, help="column of sample weights")
    delimiter: str = setting(
        default=",", validator=_one_character, help="the character between fields"
    )
    header: bool = setting(
        default=True,
        validator=attrs.validators.instance_of(bool),
        help="whether line 1 has the names of the columns; false: the names are 0, 1, …",
    )
    columns: Sequence[str] | None = setting(
        default=None, help="the columns of features, in this order; None: all other columns"
    )
    input: str = setting(
        default="X", help="the input for the columns; X fits any model with one input"
    )

    def load(self) -> Columns:
        """Read the table."""
        table = _Table.read(Path(self.path), self.delimiter, self.header)
        if isinstance(self.target, str):
            labels = {"y": table.labels(self.target)}
            taken = {self.target}
        elif isinstance(self.target, Mapping):
            labels = {name: table.labels(column) for name, column in self.target.items()}
            taken = set(self.target.values())
        else:
            labels = {"y": table.numbers(self.target)}
            taken = set(self.target)
        weights = {}
        if self.weight is not None:
            weights = {DEFAULT_WEIGHT: table.numbers([self.weight])[:, 0]}
        taken = taken if self.weight is None else {*taken, self.weight}
        others = [c for c in table.header if c not in taken]
        features = others if self.columns is None else list(self.columns)
        if not features:
            raise DataError(
                f"{self.path}: no column is left for the features; all are labels or weights"
            )
        return Columns(inputs={self.input: table.numbers(features)}, labels=labels, weights=weights)


@attrs.frozen
class _Table:
    """The fields of a file as strings; ``lines`` are the numbers of the last line of each row."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    lines: list[int]
    places: Mapping[str, int]
    """The index of each column: tables of 100,000 columns are read in linear time."""
    headed: bool

    @classmethod
    def read(cls, path: Path, delimiter: str, headed: bool) -> _Table:
        rows: list[list[str]] = []
        ends: list[int] = []
        try:
            # utf-8-sig: spreadsheets begin their files with a byte-order mark.
            with open_text(path, newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(lines(file, path), delimiter=delimiter, strict=True)
                for row in reader:
                    if row:
                        rows.append(row)
                        ends.append(reader.line_num)
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: expected text in UTF-8: {error}") from error
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        except MemoryError as error:
            raise DataError(
                f"{path}: does not fit into memory; parquet and arrow files are read in pieces"
            ) from error
        if len(rows) < 1 + headed:
            content = "only a header" if rows else "nothing"
            raise DataError(f"{path}: expected {'a header and ' * headed}rows, found {content}")
        if headed:
            header = [name.strip() for name in rows[0]]
            rows, ends = rows[1:], ends[1:]
        else:
            header = [str(k) for k in range(len(rows[0]))]
        places = {name: k for k, name in enumerate(header)}
        table = cls(path, header, rows, ends, places, headed)
        table._check(delimiter)
        return table

    def _check(self, delimiter: str) -> None:
        # A place is that of the last column with the name.
        twice = next((n for k, n in enumerate(self.header) if self.places[n] != k), None)
        if twice is not None:
            raise DataError(
                f"{self.path}, line 1: two columns are named {twice!r}; {self._hint() or 'rename one'}"
            )
        for row, line in zip(self.rows, self.lines, strict=True):
            if len(row) != len(self.header):
                raise DataError(
                    f"{self.path}, line {line}: expected {len(self.header)} fields as in "
                    f"line 1, got {len(row)} with the delimiter {delimiter!r}"
                )

    def _hint(self) -> str:
        """Advice if the first line is data; otherwise ""."""
        if self.headed and self.header and all(_is(float, name) for name in self.header):
            return (
                "line 1 has numbers only, so the table seems to have no header; read it with header = "
                "false, which names the columns 0, 1, 2, …"
            )
        return ""

    def _place(self, column: str) -> int:
        if column not in self.places:
            known = self._hint() or suggest(column, self.header)
            if not self.headed:
                last = len(self.header) - 1
                known = (
                    f'without a header columns are named 0 to {last}: target = "{last}" is the last'
                )
            raise DataError(f"{self.path}: no column {column!r}; {known}")
        return self.places[column]

    def numbers(self, columns: Sequence[str]) -> Array:
        """The columns side by side in float32."""
        places = [self._place(c) for c in columns]
        fields = [[row[p] for p in places] for row in self.rows]
        try:
            # In an array of strings, every field would take the memory of the longest one.
            return np.array([[float(text) for text in row] for row in fields], np.float32)
        except ValueError:
            for row, line in zip(fields, self.lines, strict=True):
                for column, text in zip(columns, row, strict=True):
                    if not _is(float, text):
                        raise DataError(
                            f"{self.path}, line {line}, column {column!r}: expected a number, "
                            f"got {text!r}"
                        ) from None
            raise

    def labels(self, column: str) -> Array:
        """The column as integers, other numbers or strings."""
        place = self._place(column)
        fields = [row[place].strip() for row in self.rows]
        if all(_is(int, text) for text in fields):
            try:
                return np.array([int(text) for text in fields], np.int64)
            except OverflowError:  # numbers that are too large for int64
                return self.numbers([column])[:, 0]
        numeric = [_is(float, text) for text in fields]
        if not any(numeric) and all(fields):
            longest = max(range(len(fields)), key=lambda k: len(fields[k]))
            if len(fields[longest]) > _LONGEST:
                raise DataError(
                    f"{self.path}, line {self.lines[longest]}, column {column!r}: a class name of "
                    f"{len(fields[longest])} characters; {_LONGEST} at most"
                )
            return np.array(fields)
        if all(numeric):
            return self.numbers([column])[:, 0]
        # One wrong field must not turn a column of numbers into classes.
        odd = numeric.index(not numeric[0]) if fields[0] else 0
        wanted = "a class name" if fields[0] and not numeric[0] else "a number"
        raise DataError(
            f"{self.path}, line {self.lines[odd]}, column {column!r}: expected {wanted} as in the "
            f"other rows, got {fields[odd]!r}"
        )


def _is(kind: type[int] | type[float], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
