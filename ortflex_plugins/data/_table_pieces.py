"""Tables in files that are read by groups of rows; ``parquet`` and ``arrow`` have the readers."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from ortflex_core import (
    Columns,
    DataError,
    DataSource,
    Pieces,
    read_if_small,
    reason,
    setting,
    usual_buffer,
)
from ortflex_plugins.data._columns import rows_or_none
from ortflex_plugins.data._tables import Plan, files, pyarrow


class Reader(abc.ABC):
    """Reads files of one format; the caller handles errors of pyarrow."""

    ending: str

    @abc.abstractmethod
    def look(self, file: Path) -> tuple[Any, list[int]]:
        """The schema, and the number of rows of every group."""

    @abc.abstractmethod
    def read(self, file: Path, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """The schema, then record batches of one group with these columns."""


@attrs.frozen(kw_only=True)
class Table(DataSource, abc.ABC):
    """A table in one or several files; data may be larger than the memory."""

    path: str = setting(help="the file, or a folder of files")
    target: str | Sequence[str] | Mapping[str, str] = setting(
        default="y", help="the column of labels, a list of columns, or {label = column}"
    )
    weight: str | None = setting(default=None, help="column of sample weights")
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = setting(
        default=None,
        help="the columns of features, or {input = column or list}; None: all other columns",
    )
    input: str = setting(
        default="X", help="the input for the columns; X fits any model with one input"
    )
    buffer: int | None = setting(
        default=None,
        validator=rows_or_none,
        help="the number of rows that are shuffled together; by default as many as fit into 64 MiB",
    )

    @abc.abstractmethod
    def reader(self) -> Reader:
        """The reader of the format."""

    def load(self) -> Columns | Pieces:
        """Read data that fit into the buffer; of larger data, only the metadata."""
        return read_if_small(TablePieces(self))


class TablePieces(Pieces):
    """The groups of rows of some files.

    Raises:
        DataError: there is no file, files differ, a column is missing, or there are no rows.
    """

    def __init__(self, table: Table) -> None:
        pyarrow()
        self._reader = table.reader()
        self._groups: list[tuple[Path, int]] = []
        self._sizes: list[int] = []
        plan: Plan | None = None
        paths = files(table.path, self._reader.ending)
        for file in paths:
            with _named_errors(file):
                schema, sizes = self._reader.look(file)
                if plan is None:
                    given = table.target, table.weight, table.columns, table.input
                    plan = Plan.of(schema, file, *given)
                plan.check(schema, file)
            filled = [(group, rows) for group, rows in enumerate(sizes) if rows]
            self._groups += [(file, group) for group, _ in filled]
            self._sizes += [rows for _, rows in filled]
        assert plan is not None
        self._plan = plan
        if not self._sizes:
            raise DataError(f"{paths[0]}: the data are empty: 0 rows")
        first = next(self.read(0), None)
        if first is None:
            raise DataError(f"{paths[0]}: its metadata have {self._sizes[0]} rows, its data have 0")
        self._buffer = table.buffer or usual_buffer(first)

    @property
    def sizes(self) -> Sequence[int]:
        """Rows of every group."""
        return self._sizes

    @property
    def buffer(self) -> int:
        """Rows of the shuffle buffer."""
        return self._buffer

    def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
        """The rows of a group."""
        file, group = self._groups[piece]
        with _named_errors(file):
            batches = self._reader.read(file, group, self._plan.columns)
            self._plan.check(next(batches), file)
            row = 0
            for batch in batches:
                skip = min(max(start - row, 0), batch.num_rows)
                row += skip
                if skip < batch.num_rows:
                    rows = batch.slice(skip)
                    yield self._plan.read(rows, f"{self.place(piece)}, from row {row}")
                    row += rows.num_rows

    def place(self, piece: int) -> str:
        """The file, and the number of the group in it."""
        file, group = self._groups[piece]
        return f"{file}, row group {group}"


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    """Turn errors of pyarrow into DataErrors with the name of the file."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{file}: no longer exists") from None
    except DataError:
        raise
    # A broken file may have names that are not UTF-8, and huge sizes.
    except (
        OSError,
        UnicodeDecodeError,
        MemoryError,
        OverflowError,
        pyarrow().ArrowException,
    ) as error:
        what = reason(error).splitlines()[0]
        raise DataError(f"{file}: cannot be read: {what}") from error
