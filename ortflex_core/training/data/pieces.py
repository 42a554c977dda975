"""Data that are read piece by piece, because they may not fit into memory."""

from __future__ import annotations

import abc
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ortflex_core.kernel.batches import Batch, Epoch, refuse_other_kind
from ortflex_core.kernel.digests import of_columns
from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.prefetch import Prefetch
from ortflex_core.training.data.shuffle_buffer import (
    Buffer,
    Cursor,
    Denominators,
    Layout,
    Part,
    as_batch,
    concat_parts,
    cut_batches,
    fill_buffers,
)

BUFFER_BYTES = 64 * 2**20
"""The memory of a shuffle buffer if its number of rows is not given."""


class Pieces(abc.ABC):
    """Data that is read in pieces, because it may not fit into memory.

    A piece is a group of rows that can be read separately, such as a file, a row group of a parquet
    file, or a range of rows of an array. Pieces are numbered from 0 and can be read in any order. A
    data source returns an instance from ``load``, and ``Trainer.fit`` also accepts one as its data.
    :mod:`ortflex_core.training.data.shuffle_buffer` describes how the rows are shuffled.

    Define ``sizes``, ``buffer``, ``read`` and ``place``:

    >>> class Squares(Pieces):
    ...     sizes = (2, 3)    # 5 rows in two pieces
    ...     buffer = 4
    ...     def read(self, piece, start=0):
    ...         x = np.arange(piece * 2 + start, piece * 2 + self.sizes[piece], dtype=np.float32)[:, None]
    ...         yield Columns(inputs={"x": x}, labels={"y": x**2})
    ...     def place(self, piece):
    ...         return f"piece {piece}"
    >>> [part.labels["y"].ravel().tolist() for part in Squares().read(1, start=1)]
    [[9.0, 16.0]]
    """

    @property
    @abc.abstractmethod
    def sizes(self) -> Sequence[int]:
        """The number of rows of each piece."""

    @property
    @abc.abstractmethod
    def buffer(self) -> int:
        """The number of rows in the shuffle buffer; data that has at most as many rows is read once."""

    @abc.abstractmethod
    def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
        """Read a piece.

        Background threads for training and for validation call this method, so it must not change the
        object.

        Args:
            piece: the number of the piece.
            start: the number of rows to skip at the beginning of the piece.

        Returns:
            The remaining rows in their order, as :class:`Columns` with any number of rows each.

        Raises:
            DataError: the piece was removed, is damaged, or has changed.
        """

    @abc.abstractmethod
    def place(self, piece: int) -> str:
        """The name of a piece for messages, such as the path of a file."""

    @property
    def digest(self) -> str:
        """A digest of the files from which the rows are read (:func:`files_digest`), or "".

        It must change if a row may have changed. If it is the same, a resumed run uses stored results
        that were computed from the rows (``cache=``) again. With "", every run computes these results.
        """
        return ""


def files_digest(files: Iterable[Path], *facts: Any) -> str:
    """A digest of the names, sizes and times of files, and of other values on which the rows depend.

    The contents of the files are not read. A file that was written again has a different time of change
    (ctime), which programs cannot set.

    >>> files_digest([], "csv") == files_digest([], "csv") != files_digest([], "npy")
    True
    """
    digest = hashlib.sha256(repr(facts).encode())
    for file in files:
        try:
            known = file.stat()
        except OSError:  # an error when it is read
            digest.update(f"{file}\0".encode("utf-8", "surrogateescape"))
            continue
        numbers = known.st_size, known.st_mtime_ns, known.st_ctime_ns, known.st_dev, known.st_ino
        digest.update(f"{file}\0{numbers}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def rows_of(pieces: Pieces) -> int:
    """The number of all rows."""
    return sum(pieces.sizes)


def head(pieces: Pieces, rows: int) -> Columns:
    """The first rows, in memory; fewer if there are fewer."""
    parts: list[Columns] = []
    for piece in range(len(pieces.sizes)):
        for columns in pieces.read(piece):
            parts.append(columns.take(np.arange(min(rows, columns.rows))))
            rows -= parts[-1].rows
            if rows <= 0:
                return concat_columns(parts)
    if not parts:
        raise DataError("the data are empty: 0 rows")
    return concat_columns(parts)


def usual_buffer(columns: Columns) -> int:
    """The number of rows in a shuffle buffer of 64 MiB, estimated from some rows.

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
    """Concatenate columns."""
    if len(parts) == 1:
        return parts[0]

    def column(group: str) -> dict[str, Array]:
        names = getattr(parts[0], group)
        return {n: np.concatenate([getattr(part, group)[n] for part in parts]) for n in names}

    return Columns(inputs=column("inputs"), labels=column("labels"), weights=column("weights"))


@attrs.frozen(kw_only=True)
class Conversion:
    """The conversion of a user's rows to rows that graphs read.

    ``convert`` is the first step, for columns of a file.
    """

    prepare: Callable[[Columns], dict[str, Array]]
    denominators: Callable[[Mapping[str, Array]], Denominators]
    convert: Callable[[Columns], Columns] = lambda columns: columns

    def part(self, columns: Columns, where: str, mark: Any = None) -> Part:
        """Some rows as a part."""
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


Parts = Callable[[Layout, int, int], Iterator[Part]]
"""Reads rows of an epoch in parts: its layout, the number of the first row, and the end."""


class PieceBatches:
    """Batches of pieces: buffers are read in the background, one ahead of the steps.

    While the last buffer of an epoch is in use, the first one of the next epoch is read.

    The position is a number of batches, as for arrays: an epoch can be entered anywhere.

    With several batches per step, shuffled rows come from as many ``streams``: the rows of all
    pieces, end to end, are divided into one range for each stream, and batch k of a step is the
    next one of stream k, which has separate buffers. So a process that computes some batches of
    every step reads only their rows: ``own`` is the first stream that it reads, and the distance
    to its next stream.

    ``parts`` reads rows of an epoch from another place than the pieces: its layout, the first row
    and the end.

    Attributes:
        waited: seconds that steps waited for data.
    """

    def __init__(
        self,
        pieces: Pieces,
        conversion: Conversion,
        batch_size: int,
        streams: int = 1,
        own: tuple[int, int] = (0, 1),
        drop_last: bool = False,
        parts: Parts | None = None,
    ) -> None:
        self.pieces = pieces
        self._read = self.parts if parts is None else parts
        self._streams = streams
        self._own_streams = range(own[0], streams, own[1])
        self.rows = rows_of(pieces)
        self.batch_size = min(batch_size, self.rows)
        if drop_last:  # the rows at the end of the order, which are others in every epoch
            self.rows -= self.rows % self.batch_size
        self.steps = -(-self.rows // self.batch_size)
        self.waited = 0.0
        self._conversion = conversion
        self._digests: dict[str, dict[str, Any]] = {}
        self._next_epoch: tuple[int, list[Prefetch[Buffer]]] | None = None

    def sample(self) -> Batch:
        """A batch to inspect."""
        layout = Layout.draw(self.pieces.sizes, None)
        with closing(self._read(layout, 0, self.batch_size)) as parts:  # type: ignore[type-var]
            return as_batch(concat_parts(list(parts)))

    def position(self) -> dict[str, Any]:
        """The order of the data and a digest of their first rows, for a checkpoint."""
        self._digests = self._digests or of_columns(dict(head(self.pieces, self.batch_size)))
        return {**self._order(), "columns": self._digests}

    def _order(self) -> dict[str, Any]:
        sizes = np.asarray(self.pieces.sizes, np.int64)
        return {
            "kind": "pieces",
            "pieces": len(sizes),
            "sizes": zlib.crc32(sizes.tobytes()),
            "buffer": self.pieces.buffer,
            "streams": self._streams,
        }

    def resume(self, position: Mapping[str, Any]) -> None:
        """Refuse data in a different order."""
        refuse_other_kind(position, "pieces")
        position = {"streams": 1, **position}  # written by a version without streams
        if position["streams"] == 1 and len(self._own_streams) == self._streams:
            self._streams = 1
            self._own_streams = range(1)
        now = self._order()
        if differ := [name for name in now if position.get(name, now[name]) != now[name]]:
            name = differ[0]
            if name == "sizes":
                raise DataError(
                    "the interrupted run had the same number of pieces of data, but their "
                    "sizes differ; pass the same data"
                )
            raise DataError(
                f"the interrupted run had {name} = {position[name]}, but these data have "
                f"{now[name]}, so the order of the rows would differ; pass the same {name}"
            )

    def batches(self, epoch: Epoch) -> Iterator[Sequence[Batch]]:
        """The batches of the streams that this process reads, which have every row once."""
        following = epoch.following
        begun = self._next_epoch
        if begun is not None and (begun[0] != epoch.number or epoch.start):
            self.close()
            begun = None
        first = epoch.start // max(1, len(self._own_streams))
        ahead = self._begin(epoch.rng, first) if begun is None else begun[1]
        self._next_epoch = None
        before = self.waited
        try:
            cursors = [Cursor(a, self._skipped(first)[1]) for a in ahead]
            at_once = epoch.at_once if self._streams == 1 else 1
            drawn = [cut_batches(c, self.batch_size, at_once, first) for c in cursors]
            for group in _in_turn(drawn):
                self.waited = before + sum(a.waited for a in ahead)
                if following is not None and all(a.over for a in ahead):
                    self._next_epoch = epoch.number + 1, self._begin(following(), 0)
                    following = None
                yield group
        finally:
            _close(ahead)

    def close(self) -> None:
        """Stop reading an epoch that will not be used."""
        if self._next_epoch is not None:
            _close(self._next_epoch[1])
            self._next_epoch = None

    def _skipped(self, start: int) -> tuple[int, int]:
        """The buffer in which a batch of a stream begins, and the number of its rows before the batch."""
        return divmod(start * self.batch_size, self._buffer_size)

    @property
    def _buffer_size(self) -> int:
        """Rows of a buffer of one stream."""
        return max(1, self.pieces.buffer // self._streams)

    def _begin(self, rng: np.random.Generator | None, start: int) -> list[Prefetch[Buffer]]:
        """Start to read an epoch, at a batch of each stream."""
        layout = Layout.draw(self.pieces.sizes, rng)
        first = self._skipped(start)[0]
        return [
            Prefetch(partial(self._buffers, layout, k, first), ahead=1) for k in self._own_streams
        ]

    def _buffers(self, layout: Layout, stream: int, first: int) -> Iterator[Buffer]:
        begin, end = self._bounds(stream)
        key = layout.key
        size = self._buffer_size
        if key is not None and self._streams > 1:
            key = int(np.random.default_rng([key, stream]).integers(2**63))
        parts = self._read(layout, min(begin + first * size, end), end)
        return fill_buffers(parts, size, first, key)

    def _bounds(self, stream: int) -> tuple[int, int]:
        """The range of a stream among all rows."""
        counts = [len(range(k, self.steps, self._streams)) for k in range(stream + 1)]
        missing = self.steps * self.batch_size - self.rows  # in the last batch
        rows = [n * self.batch_size for n in counts]
        last = (self.steps - 1) % self._streams
        if last <= stream:
            rows[last] -= missing
        return sum(rows[:-1]), sum(rows)

    def parts(self, layout: Layout, row: int, end: int) -> Iterator[Part]:
        """The rows of an epoch from number ``row`` on, read from the pieces in parts."""
        first, offset = layout.seek(row)
        left = end - row
        for piece in layout.pieces[first:].tolist():
            if not left:
                return
            where, size = self.pieces.place(piece), self.pieces.sizes[piece]
            stop = min(size, offset + left)  # another stream has the other rows of the piece
            read = offset
            for columns in self.pieces.read(piece, offset):
                rows = columns.rows
                if read + rows > stop and stop < size:
                    columns = columns.take(np.arange(stop - read))
                last = read + columns.rows - 1
                yield self._conversion.part(columns, f"{where}, rows {read} to {last}")
                read += rows
                if read >= stop and stop < size:
                    return
            if read != size:
                raise DataError(
                    f"{where} has {read} rows now, but it had {size} when it was opened"
                )
            left -= size - offset
            offset = 0


def _in_turn(drawn: Sequence[Iterator[Sequence[Batch]]]) -> Iterator[Sequence[Batch]]:
    """A batch of each iterator in turn, until the first iterator is exhausted."""
    if len(drawn) == 1:
        yield from drawn[0]
        return
    while True:
        for one in drawn:
            group = next(one, None)
            if group is None:
                return
            yield group


def _close(ahead: Sequence[Prefetch[Buffer]]) -> None:
    for one in ahead:
        one.close()
