"""Data that are read piece by piece, because all of them would not fit into memory."""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import attrs
import numpy as np

from ortflex_core.data.batches import Batch, Following, refuse_other_kind
from ortflex_core.data.columns import Columns
from ortflex_core.data.digests import of_columns
from ortflex_core.data.prefetch import Prefetch
from ortflex_core.data.shuffle_buffer import (
    Cursor,
    Denominators,
    Layout,
    Part,
    Window,
    batches,
    whole,
    windows,
)
from ortflex_core.errors import DataError
from ortflex_core.types import Array

BUFFER_BYTES = 64 * 2**20
"""The memory of a shuffle buffer if its number of rows is not given."""


class Pieces(abc.ABC):
    """Rows in pieces that can be read in any order: files, row groups, runs of rows of an array.

    What :meth:`ortflex_core.protocols.DataSource.load` returns for data that do not fit into the
    shuffle buffer. How rows are shuffled is in :mod:`ortflex_core.data.shuffle_buffer`.
    """

    @property
    @abc.abstractmethod
    def sizes(self) -> Sequence[int]:
        """Rows of every piece."""

    @property
    @abc.abstractmethod
    def buffer(self) -> int:
        """Rows of the shuffle buffer."""

    @abc.abstractmethod
    def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
        """The rows of a piece from ``start`` on, as many at a time as is convenient.

        Called from background threads, of the training and of the validation: keep no state.

        Raises:
            DataError: the piece was removed, is broken, or has changed.
        """

    @abc.abstractmethod
    def place(self, piece: int) -> str:
        """The name of a piece in messages."""


def rows_of(pieces: Pieces) -> int:
    """How many rows there are."""
    return sum(pieces.sizes)


def head(pieces: Pieces, rows: int) -> Columns:
    """The first rows, in memory; fewer if there are fewer.

    Raises:
        DataError: the data are empty.
    """
    found: list[Columns] = []
    for piece in range(len(pieces.sizes)):
        for columns in pieces.read(piece):
            found.append(columns.take(np.arange(min(rows, columns.rows))))
            rows -= found[-1].rows
            if rows <= 0:
                return concat_columns(found)
    if not found:
        raise DataError("the data are empty: 0 rows")
    return concat_columns(found)


def usual_buffer(columns: Columns) -> int:
    """Rows of a shuffle buffer of 64 MiB, from some rows of the data.

    >>> usual_buffer(Columns(inputs={"X": np.zeros((2, 1024), np.float32)}))
    16384
    """
    rows = max(columns.rows, 1)
    taken = sum(array.nbytes for _, array in columns)
    return max(1, BUFFER_BYTES * rows // max(taken, 1))


def read_if_small(pieces: Pieces) -> Columns | Pieces:
    """Data that fit into the shuffle buffer are read at once and treated as arrays."""
    return head(pieces, pieces.buffer) if rows_of(pieces) <= pieces.buffer else pieces


def concat_columns(parts: Sequence[Columns]) -> Columns:
    """Columns one after the other."""
    if len(parts) == 1:
        return parts[0]

    def column(group: str) -> dict[str, Array]:
        names = getattr(parts[0], group)
        return {n: np.concatenate([getattr(part, group)[n] for part in parts]) for n in names}

    return Columns(inputs=column("inputs"), labels=column("labels"), weights=column("weights"))


@attrs.frozen(kw_only=True)
class Making:
    """How rows of a file become rows that graphs take."""

    prepare: Callable[[Columns], dict[str, Array]]
    denominators: Callable[[Mapping[str, Array]], Denominators]
    convert: Callable[[Columns], Columns] = lambda columns: columns

    def part(self, columns: Columns, where: str, mark: Any = None) -> Part:
        """The part that some rows make.

        Raises:
            DataError: they do not fit; the message says where they are from.
        """
        try:
            prepared = self.prepare(self.convert(columns))
            return Part(
                columns=prepared,
                denominators=self.denominators(prepared),
                rows=columns.rows,
                where=where,
                mark=mark,
            )
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


class PieceBatches:
    """Batches of pieces: windows are read in the background, one ahead of the steps.

    While the last window of an epoch is in use, the first of the next is read.

    The place of a training is a number of batches, as for arrays: an epoch can be entered anywhere.

    Attributes:
        waited: seconds that steps waited for data.
    """

    def __init__(self, pieces: Pieces, making: Making, batch_size: int) -> None:
        self.pieces = pieces
        self.rows = rows_of(pieces)
        self.batch_size = min(batch_size, self.rows)
        self.steps = -(-self.rows // self.batch_size)
        self.waited = 0.0
        self._making = making
        self._said: dict[str, dict[str, Any]] = {}
        self._begun: tuple[int, Prefetch[Window]] | None = None

    def sample(self) -> Batch:
        """A batch to inspect."""
        return whole(self._making.part(head(self.pieces, self.batch_size), self.pieces.place(0)))

    def place(self) -> dict[str, Any]:
        """The order of the data and a digest of their first rows, for a checkpoint."""
        self._said = self._said or of_columns(dict(head(self.pieces, self.batch_size)))
        return {**self._order(), "columns": self._said}

    def _order(self) -> dict[str, Any]:
        sizes = np.asarray(self.pieces.sizes, np.int64)
        return {
            "kind": "pieces",
            "pieces": len(sizes),
            "sizes": zlib.crc32(sizes.tobytes()),
            "buffer": self.pieces.buffer,
        }

    def go_on(self, place: Mapping[str, Any]) -> None:
        """Refuse data that come in another order.

        Raises:
            DataError: the interrupted training had other pieces or another buffer.
        """
        refuse_other_kind(place, "pieces")
        now = self._order()
        if differ := [name for name in now if place.get(name, now[name]) != now[name]]:
            name = differ[0]
            if name == "sizes":
                raise DataError(
                    "the training to continue had as many pieces of data, but of other sizes; give "
                    "the same data"
                )
            raise DataError(
                f"the training to continue had {name} = {place[name]}, these data give {now[name]}: "
                f"the rows would come in another order; give the same {name}"
            )

    def epoch(
        self,
        rng: np.random.Generator | None,
        at_once: int = 1,
        start: int = 0,
        number: int = 0,
        more: Following | None = None,
    ) -> Iterator[Sequence[Batch]]:
        """Every row once, without the first ``start`` batches; in the given order without ``rng``."""
        skip = start * self.batch_size
        first, rest = divmod(skip, self.pieces.buffer)
        (begun, ahead), self._begun = self._begun or (number, None), None
        if ahead is not None and (begun != number or start):
            ahead.close()
            ahead = None
        with closing(ahead or self._begin(rng, first)) as ahead:
            cursor = Cursor(ahead, rest)
            before = self.waited
            for group in batches(cursor, self.batch_size, at_once, start):
                self.waited = before + ahead.waited
                if more is not None and ahead.over:
                    self._begun, more = (number + 1, self._begin(more(), 0)), None
                yield group

    def close(self) -> None:
        """End the reading of an epoch that will not be used."""
        if self._begun is not None:
            self._begun[1].close()
            self._begun = None

    def _begin(self, rng: np.random.Generator | None, first: int) -> Prefetch[Window]:
        """Start to read an epoch, at a window."""
        layout, size = Layout.draw(self.pieces.sizes, rng), self.pieces.buffer

        def make() -> Iterator[Window]:
            return windows(self._parts(layout, first * size), size, first, layout.key)

        return Prefetch(make, ahead=1)

    def _parts(self, layout: Layout, row: int) -> Iterator[Part]:
        first, offset = layout.seek(row)
        for piece in layout.pieces[first:].tolist():
            where, at = self.pieces.place(piece), offset
            for columns in self.pieces.read(piece, offset):
                rows = columns.rows
                yield self._making.part(columns, f"{where}, rows {at} to {at + rows - 1}")
                at += rows
            if at != self.pieces.sizes[piece]:
                raise DataError(
                    f"{where} has {at} rows now, it had {self.pieces.sizes[piece]} when it was opened"
                )
            offset = 0
