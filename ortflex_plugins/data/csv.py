"""The data source ``csv``: a table of values with a delimiter."""

from __future__ import annotations

import codecs
import csv
import itertools
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Columns,
    DataError,
    DataSource,
    lines,
    open_regular,
    open_text,
    setting,
    suggest,
)
from ortflex_plugins.data._columns import DEFAULT_WEIGHT, TableSource
from ortflex_plugins.data._features import Features, check_kinds, guessed, kinds_of

_log = logging.getLogger("ortflex")
_LONGEST = 1000
"""The largest number of characters of a class name, because an array of strings uses it for every row."""
_SAMPLE = 2**18
"""The number of bytes from which delimiter, encoding, decimal mark and header are found."""
_LINES = 100
_USUAL = (",", ".", "utf-8-sig", True)
"""Delimiter, decimal mark, encoding and header that are not mentioned."""
_DELIMITERS = "\t;|,"
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Fields that have no value, in lower case; pandas reads most of them so."""
_WITH_COMMA = re.compile(r"[+-]?\d+,\d+(e[+-]?\d+)?", re.IGNORECASE)
_WITH_POINT = re.compile(r"[+-]?\d*\.\d+(e[+-]?\d+)?", re.IGNORECASE)


def _one_character(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and (not isinstance(value, str) or len(value) != 1 or value in '\n\r"'):
        raise ValueError(f"Csv.{attribute.name} must be one character, got {value!r}")


def _encoding(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    try:
        known = value is None or codecs.lookup(value)._is_text_encoding
    except (LookupError, TypeError):
        known = False
    if not known:
        raise ValueError(
            f"Csv.{attribute.name} must be an encoding such as 'cp1252', got {value!r}"
        )


@attrs.frozen(kw_only=True)
class Csv(TableSource):
    r"""A table in a CSV file, with one row per line, with or without a header.

    The features become one float32 input of shape [rows, columns]. If ``target`` is a name, the labels
    have the shape [rows]; they are int64 if all of them are integers, float32 if all are numbers, and
    strings otherwise. If ``target`` is a list of names, the labels are float32 and have the shape
    [rows, names]; use ``["y"]`` for a model whose output has the shape [rows, 1]. If ``target`` is a
    mapping, each key is the name of a label and each value is its column; ``{}`` means that there are
    no labels. Without a header, columns are named ``0``, ``1``, and so on. Empty lines are skipped.

    ``delimiter``, ``decimal``, ``header`` and ``encoding`` are detected from the beginning of the file
    unless you set them. The delimiter is the tab, semicolon, vertical bar or comma that gives every
    line the same number of fields. The first line is a header if it contains a string above a column of
    numbers, contains no number, or consists of the column indices 0, 1, 2, and so on. A comma within a
    number is read as the decimal mark if the delimiter is not a comma and no field contains a decimal
    point. The encoding is UTF-16 if the file starts with a UTF-16 byte-order mark, UTF-8 if the bytes
    are valid UTF-8, and cp1252 otherwise. If the file is not a UTF-8 file with commas, decimal points
    and a header, the detected settings are logged. They are also saved in the recipes that
    ``ortflex init`` and ``ortflex train`` write.

    By default, features are numbers. For other types, set ``columns`` to a mapping from columns to
    types. Columns that are not in the mapping are numbers. You can use the following types:

    - ``"category"`` converts each name to its index among the sorted names in the training data. To
      set the order yourself, use a list of the names instead of ``"category"``.
    - ``"boolean"`` converts true, yes and 1 to the number 1, and false, no and 0 to the number 0.
    - ``"date"`` converts ISO 8601 dates to days since 1970-01-01.
    - ``"year"`` converts ISO 8601 dates to years since 2000-01-01, a scale that suits neural networks.
    - ``"string"`` makes the column a separate input with the name of the column, for models that read
      strings.
    - ``"unused"`` leaves the column out.

    Empty fields, NA, N/A, NaN, null, None and ? are missing values. To replace them, set ``fill``.
    Without ``fill``, a missing value in a column of strings becomes an empty string, and any other
    missing feature is an error.

    Raises:
        DataError: the file or a column does not exist, there is no header, two columns have one name, a
            line has another number of fields, or a field is not a number; the error names line and
            column.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "data.csv").write_text("a;b;kind\n1,5;Rom;cat\n3;Bern;dog\n")
    ...     source = Csv(path=f"{folder}/data.csv", target="kind", columns={"b": "category"})
    ...     columns, found = source.load(), source.found()
    >>> columns.inputs["X"].tolist(), columns.labels["y"].tolist()
    ([[1.5, 1.0], [3.0, 0.0]], ['cat', 'dog'])
    >>> found.delimiter, found.decimal, found.columns
    (';', ',', {'b': ('Bern', 'Rom')})

    Source: RFC 4180, with any delimiter.
    """

    name: ClassVar[str] = "csv"

    path: str = setting(help="the file")
    delimiter: str | None = setting(
        default=None,
        validator=_one_character,
        help="the character between fields; by default, it is detected from the file",
    )
    decimal: Literal[".", ","] | None = setting(
        default=None,
        validator=attrs.validators.in_((None, ".", ",")),
        help="the decimal mark of numbers; by default, it is detected from the file",
    )
    encoding: str | None = setting(
        default=None,
        validator=_encoding,
        help="the character encoding; by default, it is detected from the file",
    )
    header: bool | None = setting(
        default=None,
        validator=attrs.validators.instance_of(bool | None),
        help="whether line 1 contains the column names; if false, the names are 0, 1, …; by "
        "default, this is detected from the file",
    )
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = setting(
        default=None,
        validator=check_kinds,
        help="a list of the feature columns in the order of the input, or the types of columns, "
        "such as {city = 'category'}; by default, all columns except labels and weights are features",
    )

    def load(self) -> Columns:
        table = self._table()
        if isinstance(self.target, str):
            labels = {"y": table.labels(self.target)}
        elif isinstance(self.target, Mapping):
            labels = {name: table.labels(column) for name, column in self.target.items()}
        else:
            labels = {"y": table.numbers(self.target)}
        weights = {}
        if self.weight is not None:
            weights = {DEFAULT_WEIGHT: table.numbers([self.weight])[:, 0]}
        features = self._features(table)
        if not features:
            raise DataError(
                f"{self.path}: no column is left for the features; all are labels or weights"
            )
        known = Features(kinds_of(self.columns), self.fill)
        strings = [name for name in features if known.kind(name) == "string"]
        side = [name for name in features if name not in strings]
        inputs = {self.input: table.features(side, known)} if side else {}
        inputs |= {name: table.feature(name, known) for name in strings}
        return Columns(inputs=inputs, labels=labels, weights=weights)

    def found(self, like: DataSource | None = None) -> Csv:
        """The dialect, the names of categories and the medians as parameters."""
        table = self._table(quiet=True)
        known = table.dialect
        theirs = Features(kinds_of(like.columns), like.fill) if isinstance(like, Csv) else None
        features = Features(kinds_of(self.columns), self.fill).found(
            self._features(table), table.texts, table.value, theirs
        )
        return attrs.evolve(
            self,
            delimiter=known.delimiter,
            decimal="," if known.decimal == "," else ".",
            encoding=known.encoding,
            header=table.headed,
            columns=features.kinds if isinstance(self.columns, Mapping) else self.columns,
            fill=features.fill,
        )

    def proposed(self) -> Csv:
        """The source with kinds for the columns that are no numbers; a usual dialect is left out."""
        table = self._table(quiet=True)
        source = self
        features = self._features(table)
        if not isinstance(self.columns, Mapping):
            kinds = {name: guessed(table.texts(name), table.value) for name in features}
            odd = {name: kind for name, kind in kinds.items() if kind != "number"}
            every = attrs.evolve(self, columns=None)._features(table)
            if features == [n for n in every if n in features]:  # in the order of the table
                odd |= {name: "unused" for name in every if name not in features} if odd else {}
                source = attrs.evolve(source, columns=odd or self.columns)
        if self.fill is None and any(None in table.texts(name) for name in features):
            source = attrs.evolve(source, fill="median")
        found = source.found()
        if (found.delimiter, found.decimal, found.encoding, found.header) == _USUAL:
            found = attrs.evolve(found, delimiter=None, decimal=None, encoding=None, header=None)
        return found

    def _table(self, *, quiet: bool = False) -> _Table:
        dialect = _Dialect.of(Path(self.path), self.delimiter, self.decimal, self.encoding)
        table = _Table.read(Path(self.path), dialect, self.header)
        given = (self.delimiter, self.decimal, self.encoding, self.header)
        now = (dialect.delimiter, dialect.decimal, dialect.encoding, table.headed)
        odd = [n is None and f != u for n, f, u in zip(given, now, _USUAL, strict=True)]
        if any(odd) and not quiet:
            header = "a header" if table.headed else "no header: columns 0, 1, …"
            _log.info(
                "%s: delimiter %r, decimal mark %r, encoding %s, %s",
                *(self.path, dialect.delimiter, dialect.decimal, dialect.encoding, header),
            )
        return table

    def _features(self, table: _Table) -> list[str]:
        kinds = kinds_of(self.columns)
        unused = Features(kinds, None).unused
        taken = {*self._targets, self.weight, *unused}
        for column in kinds:
            if column not in unused:
                table.place(column)
        if self.columns is not None and not isinstance(self.columns, Mapping):
            return list(self.columns)
        return [c for c in table.header if c not in taken]


@attrs.frozen
class _Dialect:
    delimiter: str
    decimal: str
    encoding: str

    @classmethod
    def of(
        cls, path: Path, delimiter: str | None, decimal: str | None, encoding: str | None
    ) -> _Dialect:
        """The dialect of a file; what is given is not looked for."""
        if delimiter and decimal and encoding:
            return cls(delimiter, decimal, encoding)
        try:
            with open_regular(path) as file:
                sample = file.read(_SAMPLE)
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        if encoding is None:
            encoding = (
                "utf-16" if sample[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else None
            )
        if encoding is None:
            encoding = "utf-8-sig" if _is_utf8(sample) else "cp1252"
        text = sample.decode(encoding, errors="replace")
        if len(sample) == _SAMPLE:  # the last line may be cut
            text = text.rpartition("\n")[0] or text
        first = [line for line in text.splitlines() if line][:_LINES]
        delimiter = delimiter or _delimiter(first)
        if decimal is None:
            rows = _rows(first, delimiter)
            fields = [field.strip() for row in rows for field in row]
            commas = any(map(_WITH_COMMA.fullmatch, fields))
            points = any(map(_WITH_POINT.fullmatch, fields))
            decimal = "," if delimiter != "," and commas and not points else "."
        return cls(delimiter, decimal, encoding)


def _is_utf8(sample: bytes) -> bool:
    try:
        # The last character may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(sample, final=len(sample) < _SAMPLE)
    except UnicodeDecodeError:
        return False
    return b"\0" not in sample


def _rows(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    try:
        return [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except csv.Error:
        return []


def _delimiter(lines: Sequence[str]) -> str:
    """The character that gives every line the same number of fields, at least two; else the comma."""
    for delimiter in _DELIMITERS:
        counts = {len(row) for row in _rows(lines, delimiter)}
        if len(counts) == 1 and counts.pop() > 1:
            return delimiter
    return ","


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
    dialect: _Dialect

    @classmethod
    def read(cls, path: Path, dialect: _Dialect, headed: bool | None) -> _Table:
        delimiter = dialect.delimiter
        rows: list[list[str]] = []
        ends: list[int] = []
        try:
            # utf-8-sig: spreadsheets begin their files with a byte-order mark.
            with open_text(path, newline="", encoding=dialect.encoding) as file:
                reader = csv.reader(lines(file, path), delimiter=delimiter, strict=True)
                for row in reader:
                    if row:
                        rows.append(row)
                        ends.append(reader.line_num)
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: expected text in {dialect.encoding}: {error}; encoding = … chooses another"
            ) from error
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        except MemoryError as error:
            raise DataError(
                f"{path}: does not fit into memory; parquet and arrow files are read in pieces"
            ) from error
        if headed is None:
            headed = not rows or _has_header(rows, dialect.decimal)
        if len(rows) < 1 + headed:
            content = "only a header" if rows else "nothing"
            raise DataError(f"{path}: expected {'a header and ' * headed}rows, found {content}")
        if headed:
            header = [name.strip() for name in rows[0]]
            rows, ends = rows[1:], ends[1:]
        else:
            header = [str(k) for k in range(len(rows[0]))]
        places = {name: k for k, name in enumerate(header)}
        table = cls(path, header, rows, ends, places, headed, dialect)
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

    def place(self, column: str) -> int:
        if column not in self.places:
            known = self._hint() or suggest(column, self.header)
            if column == "y" and known.startswith("Known"):
                known += '; name the column of labels with data = { path = …, target = "…" }'
            if not self.headed:
                last = len(self.header) - 1
                known = (
                    f'without a header columns are named 0 to {last}: target = "{last}" is the last'
                )
            raise DataError(f"{self.path}: no column {column!r}; {known}")
        return self.places[column]

    def numbers(self, columns: Sequence[str]) -> Array:
        """The columns side by side in float32."""
        return self.features(columns, Features({}, None))

    def texts(self, column: str) -> list[str | None]:
        """The fields of a column; None where a value is missing."""
        place = self.place(column)
        fields = [row[place].strip() for row in self.rows]
        return [None if field.lower() in _MISSING else field for field in fields]

    def value(self, text: str) -> float:
        """A field as a number."""
        return float(self._number(text))

    def features(self, columns: Sequence[str], known: Features) -> Array:
        """The columns side by side in float32, with categories, booleans and dates as numbers."""
        places = [self.place(c) for c in columns]
        if not known.kinds and known.fill is None:
            fields = [[row[p] for p in places] for row in self.rows]
            try:
                # In an array of strings, every field would take the memory of the longest one.
                plain = [[float(self._number(text)) for text in row] for row in fields]
                if not any(map(math.isnan, itertools.chain.from_iterable(plain))):
                    return np.array(plain, np.float32)
            except ValueError:
                pass  # the search below names the field
        out = np.empty((len(self.rows), len(columns)), np.float32)
        for k, column in enumerate(columns):
            out[:, k] = self.feature(column, known)
        return out

    def feature(self, column: str, known: Features) -> Array:
        """One column as numbers, or as strings."""
        place = self.place(column)
        return known.encode(
            column,
            self.texts(column),
            str(self.path),
            self.value,
            lambda row: f"line {self.lines[row]}",
            given=lambda row: self.rows[row][place].strip(),
            advice=self._advice,
        )

    def _advice(self, text: str | None) -> str:
        if text and (_WITH_COMMA.fullmatch(text) or _WITH_POINT.fullmatch(text)):
            return f"decimal = {'.' if self.dialect.decimal == ',' else ','!r} reads such numbers"
        return ""

    def _number(self, text: str) -> str:
        """A number as Python writes it; a decimal point is wrong where the comma is the mark."""
        if self.dialect.decimal == ".":
            return text
        return "" if "." in text else text.replace(",", ".")

    def labels(self, column: str) -> Array:
        """The column as integers, other numbers or strings."""
        place = self.place(column)
        fields = [row[place].strip() for row in self.rows]
        if all(_is(int, self._number(text)) for text in fields):
            try:
                return np.array([int(text) for text in fields], np.int64)
            except OverflowError:  # numbers that are too large for int64
                return self.numbers([column])[:, 0]
        numeric = [_is(float, self._number(text)) for text in fields]
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


def _has_header(rows: Sequence[Sequence[str]], decimal: str) -> bool:
    """Whether the first row has names: a string above numbers, 0, 1, 2, … as of pandas, or no number."""

    def is_number(text: str) -> bool:
        return _is(float, text.replace(",", ".") if decimal == "," else text)

    first = [text.strip() for text in rows[0]]
    if first == [str(k) for k in range(len(first))]:
        return True
    numbers = [is_number(text) for text in first]
    for k, text in enumerate(first):
        below = [row[k].strip() for row in rows[1:_LINES] if k < len(row)]
        known = [value for value in below if value.lower() not in _MISSING]
        if not numbers[k] and text.lower() not in _MISSING and known and all(map(is_number, known)):
            return True
    return not any(numbers)


def _is(kind: type[int] | type[float], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
