"""Tables in files, read by groups of rows; parquet and arrow define how."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ortflex_core.component import setting
from ortflex_core.data import Columns, Pieces, read_if_small, usual_buffer
from ortflex_core.errors import DataError
from ortflex_core.protocols import DataSource
from ortflex_plugins.data._columns import rows_or_none
from ortflex_plugins.data._tables import Plan, files, pyarrow


class Reader(abc.ABC):
    """Reads files of one format; errors of pyarrow are passed on."""

    ending: str

    @abc.abstractmethod
    def look(self, file: Path) -> tuple[Any, list[int]]:
        """The schema, and the rows of every group."""

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
        """How the files are read."""

    def load(self) -> Columns | Pieces:
        """Read data that fit into the buffer; of larger data, only the metadata."""
        return read_if_small(TablePieces(self))


class TablePieces(Pieces):
    """The groups of rows of some files.

    Raises:
        DataError: no file, files that differ, a missing column, no rows.
    """

    def __init__(self, table: Table) -> None:
        pyarrow()
        self._reader = table.reader()
        self._groups: list[tuple[Path, int]] = []
        self._sizes: list[int] = []
        plan: Plan | None = None
        paths = files(table.path, self._reader.ending)
        for file in paths:
            with _Naming(file):
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
        with _Naming(file):
            batches = self._reader.read(file, group, self._plan.columns)
            self._plan.check(next(batches), file)
            at = 0
            for batch in batches:
                skip = min(max(start - at, 0), batch.num_rows)
                at += skip
                if skip < batch.num_rows:
                    rest = batch.slice(skip)
                    yield self._plan.read(rest, f"{self.place(piece)}, from row {at}")
                    at += rest.num_rows

    def place(self, piece: int) -> str:
        """The file, and the number of the group in it."""
        file, group = self._groups[piece]
        return f"{file}, row group {group}"


class _Naming:
    """Errors of pyarrow as ours, with the file's name."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        """Nothing has to be done."""

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{self._file}: no longer exists") from None
        # A broken file may have names that are not UTF-8, and huge sizes.
        broken = (OSError, UnicodeDecodeError, MemoryError, OverflowError, pyarrow().ArrowException)
        if isinstance(error, broken) and not isinstance(error, DataError):
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{self._file}: cannot be read: {what}") from error
