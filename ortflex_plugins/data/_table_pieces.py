"""Tables in files that are read by groups of rows; ``parquet`` and ``arrow`` have the readers."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import attrs

from ortflex_core import (
    Columns,
    DataError,
    DataSource,
    Pieces,
    files_digest,
    read_if_small,
    reason,
    setting,
    usual_buffer,
)
from ortflex_plugins.data._columns import ListTableSource, count_or_none
from ortflex_plugins.data._features import Features, guessed, is_missing, kinds_of
from ortflex_plugins.data._tables import Padding, Plan, cells, files, lengths_of, odd_kind, pyarrow


@attrs.frozen(kw_only=True)
class Table(ListTableSource, abc.ABC):
    """A table in one or several files; data may be larger than memory.

    The caller of :meth:`look` and :meth:`batches` handles errors of pyarrow.
    """

    ending: ClassVar[str]

    path: str = setting(help="the file, or a folder of files")
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = setting(
        default=None,
        help="a list of the feature columns, a table {input = column or list} with the columns of "
        "each input, or the types of columns, such as {city = 'category'}; by default, all columns "
        "except labels and weights are features",
    )
    buffer: int | None = setting(
        default=None,
        validator=count_or_none(),
        help="the number of rows that are shuffled together; by default, as many as fit into 64 "
        "MiB",
    )

    @abc.abstractmethod
    def look(self, file: Path) -> tuple[Any, list[int]]:
        """The schema of a file, and the number of rows of every group."""

    @abc.abstractmethod
    def batches(self, file: Path, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """The schema, then record batches of one group with these columns."""

    def load(self) -> Columns | Pieces:
        """Read data that fit into the buffer; of larger data, only the metadata."""
        return read_if_small(self._known(None)[1])

    def found(self, like: DataSource | None = None) -> Table:
        """With the names of categories, the medians and the length of lists."""
        return self._known(like if isinstance(like, Table) else None)[0]

    def _known(self, like: Table | None) -> tuple[Table, TablePieces]:
        """The table without what is still to be looked up in its columns, and its pieces."""
        pieces = TablePieces(self)
        plan = pieces.plan
        if not plan.unknown:
            return self, pieces
        theirs = None if like is None else Features(kinds_of(like.columns), like.fill)
        lists = plan.lists
        flat = [name for name in plan.unknown if name not in lists]
        known = plan.known.found(flat, pieces.cells, like=theirs)
        length = self.length or (None if like is None else like.length)
        if self.pad is not None and lists:
            length = length or max(pieces.longest(name) for name in lists)
        columns: Any = self.columns
        if isinstance(columns, Mapping):
            columns = {**columns, **known.kinds}
        table = attrs.evolve(self, columns=columns, fill=known.fill, length=length)
        return table, TablePieces(table)

    def proposed(self) -> Table:
        """With kinds for the columns that are no numbers, and what fills missing values and short lists."""
        schema, _ = self.look(files(self.path, self.ending)[0])
        source = self
        if self.columns is None:
            odd = {
                field.name: odd_kind(field.type)
                for field in schema
                if field.name not in (*self._targets, self.weight) and odd_kind(field.type)
            }
            source = attrs.evolve(self, columns=odd or None)
        trial = attrs.evolve(source, fill="median" if self.fill is None else self.fill)
        pieces = TablePieces(attrs.evolve(trial, pad=0 if self.pad is None else self.pad))
        flat = [name for name in pieces.plan.features if name not in pieces.plan.lists]
        seen = {name: pieces.cells(name) for name in flat}
        if self.columns is None and isinstance(source.columns, Mapping):
            kinds = {name: guessed(seen[name]) for name in source.columns}
            source = attrs.evolve(source, columns=kinds)
        if self.fill is None and any(any(map(is_missing, values)) for values in seen.values()):
            source = attrs.evolve(source, fill="median")
        if self.pad is None and any(pieces.is_ragged(name) for name in pieces.plan.lists):
            source = attrs.evolve(source, pad=0)
        return source.found()


class TablePieces(Pieces):
    """The groups of rows of some files.

    Raises:
        DataError: there is no file, files differ, a column is missing, or there are no rows.
    """

    sizes: Sequence[int] = ()

    def __init__(self, table: Table) -> None:
        pyarrow()
        self._groups: list[tuple[Path, int]] = []
        self.sizes = rows_of = list[int]()
        plan: Plan | None = None
        paths = files(table.path, table.ending)
        for file in paths:
            with _named_errors(file):
                schema, sizes = table.look(file)
                if plan is None:
                    given = table.target, table.weight, table.columns, table.input
                    padding = Padding(table.pad, table.length)
                    plan = Plan.of(schema, file, *given, table.fill, padding)
                plan.check(schema, file)
            filled = [(group, rows) for group, rows in enumerate(sizes) if rows]
            self._groups += [(file, group) for group, _ in filled]
            rows_of += [rows for _, rows in filled]
        assert plan is not None
        self.plan = plan
        if not rows_of:
            raise DataError(f"{paths[0]}: the data are empty: 0 rows")
        self._files, self._table = paths, table

    @cached_property
    def buffer(self) -> int:
        """Rows of the shuffle buffer; by default the first rows say how many fit."""
        first = next(self.read(0), None)
        if first is None:
            file = self._groups[0][0]
            raise DataError(f"{file}: its metadata have {self.sizes[0]} rows, its data have 0")
        return self._table.buffer or usual_buffer(first)

    @property
    def digest(self) -> str:
        """Of the files, and of how their columns become numbers."""
        return files_digest(self._files, repr(self._table))

    def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
        file, group = self._groups[piece]
        with _named_errors(file):
            batches = self._table.batches(file, group, self.plan.columns)
            self.plan.check(next(batches), file)
            row = 0
            for batch in batches:
                skip = min(max(start - row, 0), batch.num_rows)
                row += skip
                if skip < batch.num_rows:
                    rows = batch.slice(skip)
                    yield self.plan.read(rows, f"{self.place(piece)}, from row {row}")
                    row += rows.num_rows

    def _parts(self, column: str) -> Iterator[Any]:
        """One column of all rows, in parts."""
        for file, group in self._groups:
            with _named_errors(file):
                batches = self._table.batches(file, group, [column])
                next(batches)
                for batch in batches:
                    yield batch.column(column)

    def cells(self, column: str) -> list[Any]:
        """The values of a column of all rows, None where one is missing."""
        return [cell for part in self._parts(column) for cell in cells(part)]

    def longest(self, column: str) -> int:
        """The largest number of values in the lists of a column."""
        return max((n for part in self._parts(column) for n in lengths_of(part)), default=0)

    def is_ragged(self, column: str) -> bool:
        """Whether the lists of a column differ in length."""
        return len({length for part in self._parts(column) for length in lengths_of(part)}) > 1

    def place(self, piece: int) -> str:
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
