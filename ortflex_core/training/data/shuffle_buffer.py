"""The shuffle buffer: rows that are read one after the other are mixed, one buffer at a time.

The order of an epoch can be entered at any row without reading the rows before it:

1. The pieces of the data (row groups, runs of rows of a file) are put into a random order.
2. Their rows, laid end to end in that order, are cut into buffers of ``size`` rows.
3. The rows of each buffer are permuted by a generator that depends only on (epoch, number of the
   buffer).

So every row occurs once per epoch, rows of distant pieces are mixed in one buffer, and at most two
buffers are in memory. If all rows fit into one buffer, the order is a uniform permutation. Without
a generator the rows keep their order.

Source: the algorithm py1b of MosaicML Streaming (shards shuffled, then samples within blocks).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core.kernel.batches import Batch, Block, totals
from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array

Denominators = Sequence[float | Array]


@attrs.frozen(kw_only=True)
class Part:
    """Some rows, ready for the graphs.

    ``denominators`` are the contributions of a row to the denominators of the losses. ``where`` is
    for messages; ``mark`` is the position of the first row in its source, for iterables of batches.
    """

    columns: Mapping[str, Array]
    denominators: Denominators
    rows: int
    where: str
    mark: Any = None

    def cut(self, start: int, stop: int) -> Part:
        """Consecutive rows; views, not copies."""
        if (start, stop) == (0, self.rows):
            return self
        mark = None if self.mark is None else self.mark.later(start)
        return attrs.evolve(self._select(slice(start, stop)), rows=stop - start, mark=mark)

    def take(self, rows: Array) -> Part:
        """Copies of the given rows."""
        return attrs.evolve(self._select(rows), rows=len(rows))

    def _select(self, rows: slice | Array) -> Part:
        return attrs.evolve(
            self,
            columns={name: array[rows] for name, array in self.columns.items()},
            denominators=[d if isinstance(d, float) else d[rows] for d in self.denominators],
        )


def concat_parts(parts: Sequence[Part]) -> Part:
    """The rows of several parts."""
    first = parts[0]
    if len(parts) == 1:
        return first
    terms = zip(*(p.denominators for p in parts), strict=True)
    return attrs.evolve(
        first,
        columns={name: np.concatenate([p.columns[name] for p in parts]) for name in first.columns},
        denominators=[_of_all_rows(term, parts) for term in terms],
        rows=sum(p.rows for p in parts),
    )


def _of_all_rows(values: Sequence[float | Array], parts: Sequence[Part]) -> float | Array:
    """One number if it is the same for all rows of all parts, otherwise one per row."""
    if all(isinstance(v, float) and v == values[0] for v in values):
        return values[0]
    pairs = zip(values, parts, strict=True)
    return np.concatenate([np.full(p.rows, v) if isinstance(v, float) else v for v, p in pairs])


@attrs.frozen(kw_only=True)
class Layout:
    """The order in which the pieces of an epoch are read; without ``key`` the rows keep their order."""

    pieces: Array
    ends: Array
    key: int | None

    @classmethod
    def draw(cls, sizes: Sequence[int], rng: np.random.Generator | None) -> Layout:
        """The order of one epoch.

        >>> layout = Layout.draw([3, 2, 4], None)
        >>> layout.pieces.tolist(), layout.seek(4)
        ([0, 1, 2], (1, 1))
        """
        pieces = np.arange(len(sizes)) if rng is None else rng.permutation(len(sizes))
        ends = np.cumsum(np.asarray(sizes, np.int64)[pieces])
        return cls(pieces=pieces, ends=ends, key=draw_key(rng))

    def seek(self, row: int) -> tuple[int, int]:
        """The place in ``pieces`` of a row of the epoch, and the number of rows before it in that piece."""
        k = int(np.searchsorted(self.ends, row, side="right"))
        return k, row - (int(self.ends[k - 1]) if k else 0)


def draw_key(rng: np.random.Generator | None) -> int | None:
    """The key from which the permutations of an epoch's buffers are drawn."""
    return None if rng is None else int(rng.integers(2**63))


@attrs.frozen
class Buffer:
    """Rows that are in memory together.

    Attributes:
        part: the rows.
        order: their order in the epoch.
        number: counts the buffers of an epoch from 0.
    """

    part: Part
    order: Array
    number: int


def fill_buffers(parts: Iterable[Part], size: int, first: int, key: int | None) -> Iterator[Buffer]:
    """Buffers of ``size`` rows, the last one shorter; ``first`` is the number of the first buffer."""
    number, held, count = first, list[Part](), 0
    for part in parts:
        if held:
            _check_shapes(held[0], part)
        start = 0
        while count + part.rows - start >= size:
            stop = start + size - count
            held.append(part.cut(start, stop))
            yield _shuffled(held, number, key)
            number, held, count, start = number + 1, [], 0, stop
        if start < part.rows:
            held.append(part.cut(start, part.rows))
            count += part.rows - start
    if held:
        yield _shuffled(held, number, key)


def _check_shapes(first: Part, part: Part) -> None:
    for name, array in part.columns.items():
        before = first.columns[name]
        if before.shape[1:] != array.shape[1:]:
            raise DataError(
                f"{part.where}: the rows of {name!r} have shape {list(array.shape[1:])}, those of "
                f"{first.where} {list(before.shape[1:])}; rows that are shuffled together need "
                "the same shape: pad them, or pass batches of equal rows without buffer="
            )


def _shuffled(parts: Sequence[Part], number: int, key: int | None) -> Buffer:
    part = concat_parts(parts)
    order = np.arange(part.rows)
    if key is not None:
        np.random.default_rng([key, number]).shuffle(order)
    return Buffer(part, order, number)


class Cursor:
    """Reads any number of rows at a time from buffers.

    Attributes:
        marks: number and mark of the buffers that the rows taken last are from.
    """

    def __init__(self, source: Iterator[Buffer], skip: int) -> None:
        self.marks: list[tuple[int, Any]] = []
        self._source = source
        self._skip = skip
        self._buffer: Buffer | None = None
        self._next = 0

    def take(self, rows: int) -> tuple[Part, Array] | None:
        """A part and its next rows, fewer at the end; None after the last row."""
        taken: list[tuple[Buffer, Array]] = []
        while rows and (buffer := self._current()) is not None:
            numbers = buffer.order[self._next : self._next + rows]
            taken.append((buffer, numbers))
            self._next += len(numbers)
            rows -= len(numbers)
        if not taken:
            return None
        self.marks = [(buffer.number, buffer.part.mark) for buffer, _ in taken]
        if len(taken) == 1:
            buffer, numbers = taken[0]
            return buffer.part, numbers
        joined = concat_parts([buffer.part.take(numbers) for buffer, numbers in taken])
        return joined, np.arange(joined.rows)

    def _current(self) -> Buffer | None:
        """The buffer of the next row."""
        while self._buffer is None or self._next >= len(self._buffer.order):
            fresh = next(self._source, None)
            if fresh is None:
                return None
            self._buffer, self._next = fresh, min(self._skip, len(fresh.order))
            self._skip -= self._next
        return self._buffer


def cut_batches(cursor: Cursor, size: int, at_once: int, start: int) -> Iterator[Sequence[Batch]]:
    """Batches of ``size`` rows, the last one shorter, from number ``start`` on.

    They are grouped by ``at_once``; groups begin at multiples of it, also if training continues in
    between; the remaining batches are single.
    """
    of_full_batch: list[float] | None = None
    of_full_group: list[list[float]] = []
    number = start
    while True:
        count = at_once if number % at_once == 0 else 1
        taken = cursor.take(count * size)
        if taken is None:
            return
        part, rows = taken
        fixed = [d * size for d in part.denominators if isinstance(d, float)]
        uniform = len(fixed) == len(part.denominators)
        if uniform and fixed != of_full_batch:
            # One list for all batches, because engines compare it by identity.
            of_full_batch, of_full_group = fixed, [fixed] * at_once
        spans = (rows[first : first + size] for first in range(0, len(rows), size))
        if count > 1 and len(rows) == count * size:
            denominators = of_full_group
            if not uniform:
                denominators = [totals(part.denominators, size, span) for span in spans]
            yield Block(part.columns, rows, size, denominators)
        else:
            for span in spans:
                if uniform and len(span) == size:
                    of_batch = of_full_group[0]
                else:
                    of_batch = totals(part.denominators, len(span), span)
                yield (Batch(part.columns, span, len(span), of_batch),)
        number += count


def as_batch(part: Part) -> Batch:
    """All rows of a part as one batch."""
    return Batch(part.columns, None, part.rows, totals(part.denominators, part.rows))
