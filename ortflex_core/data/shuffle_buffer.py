"""The shuffle buffer: rows that come one after the other, mixed within windows.

The order of an epoch can be entered at any row without reading the rows before it:

1. The pieces of the data (row groups, runs of rows of a file) are put into a random order.
2. Their rows, laid end to end in that order, are cut into windows of ``size`` rows.
3. The rows of every window are permuted, by a generator of (epoch, number of the window) alone.

So every row occurs once per epoch, rows of distant pieces are mixed in one window, and at most two
windows are in memory. A window of all rows is a uniform permutation. Without a generator the rows
keep their order.

Source: the algorithm py1b of MosaicML Streaming (shards shuffled, then samples within blocks).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core.data.batches import Batch, Block, totals
from ortflex_core.errors import DataError
from ortflex_core.types import Array

Denominators = Sequence[float | Array]
Taken = tuple[Mapping[str, Array], Denominators, Array]
"""Columns, the contribution of each row to the denominators, and the selected rows."""


@attrs.frozen(kw_only=True)
class Part:
    """Some consecutive rows, ready for the graphs.

    ``where`` is for messages; ``mark`` is the position of the first row in its source, for
    iterables of batches.
    """

    columns: Mapping[str, Array]
    denominators: Denominators
    rows: int
    where: str
    mark: Any = None

    def cut(self, start: int, stop: int) -> Part:
        """Some of the rows; views, not copies."""
        if (start, stop) == (0, self.rows):
            return self
        mark = self.mark.later(start) if self.mark is not None and start else self.mark
        return Part(
            columns={name: array[start:stop] for name, array in self.columns.items()},
            denominators=[d if isinstance(d, float) else d[start:stop] for d in self.denominators],
            rows=stop - start,
            where=self.where,
            mark=mark,
        )


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
    """The key from which the permutations of an epoch's windows are drawn."""
    return None if rng is None else int(rng.integers(2**63))


@attrs.frozen(kw_only=True)
class Window:
    """Rows that are in memory together.

    ``order`` is the order of the rows, ``number`` counts the windows of an epoch, ``mark`` is that
    of the first row.
    """

    columns: Mapping[str, Array]
    denominators: Denominators
    order: Array
    number: int
    mark: Any


def windows(parts: Iterable[Part], size: int, first: int, key: int | None) -> Iterator[Window]:
    """Parts as windows of ``size`` rows, the last one shorter; ``first`` is the number of the first.

    Raises:
        DataError: parts whose shapes differ.
    """
    number, held, count = first, list[Part](), 0
    for part in parts:
        _check_alike(held, part)
        start = 0
        while count + part.rows - start >= size:
            stop = start + size - count
            held.append(part.cut(start, stop))
            yield _joined(held, size, number, key)
            number, held, count, start = number + 1, [], 0, stop
        if start < part.rows:
            held.append(part.cut(start, part.rows))
            count += part.rows - start
    if held:
        yield _joined(held, count, number, key)


def _check_alike(held: Sequence[Part], part: Part) -> None:
    for name, array in part.columns.items() if held else ():
        before = held[0].columns[name]
        if before.shape[1:] != array.shape[1:]:
            raise DataError(
                f"{part.where}: the rows of {name!r} have shape {list(array.shape[1:])}, those of "
                f"{held[0].where} {list(before.shape[1:])}; rows that are shuffled together need "
                "the same shape: pad them, or pass batches of equal rows without buffer="
            )


def _joined(parts: Sequence[Part], rows: int, number: int, key: int | None) -> Window:
    order = np.arange(rows)
    if key is not None:
        np.random.default_rng([key, number]).shuffle(order)
    if len(parts) == 1:
        columns, denominators = parts[0].columns, parts[0].denominators
    else:
        columns = {
            name: np.concatenate([p.columns[name] for p in parts]) for name in parts[0].columns
        }
        terms = zip(*(p.denominators for p in parts), strict=True)
        denominators = [_all_rows(term, parts) for term in terms]
    return Window(
        columns=columns, denominators=denominators, order=order, number=number, mark=parts[0].mark
    )


def _all_rows(values: Sequence[float | Array], parts: Sequence[Part]) -> float | Array:
    """One number if it is the same for all rows of all parts, otherwise one per row."""
    if all(isinstance(v, float) and v == values[0] for v in values):
        return values[0]
    return np.concatenate(
        [
            np.full(p.rows, v) if isinstance(v, float) else v
            for v, p in zip(values, parts, strict=True)
        ]
    )


class Cursor:
    """Reads any number of rows at a time from windows.

    Attributes:
        marks: number and mark of the windows that the rows taken last are from.
    """

    def __init__(self, source: Iterator[Window], skip: int) -> None:
        self.marks: list[tuple[int, Any]] = []
        self._source = source
        self._skip = skip
        self._window: Window | None = None
        self._at = 0

    def take(self, rows: int) -> Taken | None:
        """The next rows, fewer at the end; None after the last one."""
        taken: list[tuple[Window, Array]] = []
        while rows and (window := self._current()) is not None:
            part = window.order[self._at : self._at + rows]
            taken.append((window, part))
            self._at += len(part)
            rows -= len(part)
        if not taken:
            return None
        self.marks = [(window.number, window.mark) for window, _ in taken]
        if len(taken) == 1:
            window, part = taken[0]
            return window.columns, window.denominators, part
        parts = [_gathered(*pair) for pair in taken]
        joined = _joined(parts, sum(part.rows for part in parts), 0, None)
        return joined.columns, joined.denominators, joined.order

    def _current(self) -> Window | None:
        """The window of the next row."""
        while self._window is None or self._at >= len(self._window.order):
            fresh = next(self._source, None)
            if fresh is None:
                return None
            self._window, self._at = fresh, min(self._skip, len(fresh.order))
            self._skip -= self._at
        return self._window


def _gathered(window: Window, rows: Array) -> Part:
    return Part(
        columns={name: array[rows] for name, array in window.columns.items()},
        denominators=[d if isinstance(d, float) else d[rows] for d in window.denominators],
        rows=len(rows),
        where="",
    )


def batches(cursor: Cursor, size: int, at_once: int, start: int) -> Iterator[Sequence[Batch]]:
    """Batches of ``size`` rows, the last one shorter, from number ``start`` on.

    They are grouped by ``at_once``; groups begin at multiples of it, also if a training continues
    in between; the remaining batches are single.
    """
    whole: list[float] | None = None
    wholes: list[list[float]] = []
    number = start
    while True:
        count = at_once if number % at_once == 0 else 1
        taken = cursor.take(count * size)
        if taken is None:
            return
        columns, denominators, rows = taken
        fixed = [d * size for d in denominators if isinstance(d, float)]
        uniform = len(fixed) == len(denominators)
        if uniform and fixed != whole:
            # One list for all batches, because engines compare it by identity.
            whole, wholes = fixed, [fixed] * at_once
        if count > 1 and len(rows) == count * size:
            spans = (rows[k * size : (k + 1) * size] for k in range(count))
            yield Block(
                columns,
                rows,
                size,
                wholes if uniform else [totals(denominators, size, r) for r in spans],
            )
        else:
            for at in range(0, len(rows), size):
                part = rows[at : at + size]
                full = uniform and len(part) == size
                of_part = wholes[0] if full else totals(denominators, len(part), part)
                yield (Batch(columns, part, len(part), of_part),)
        number += count


def whole(part: Part) -> Batch:
    """All rows of a part as one batch."""
    return Batch(part.columns, None, part.rows, totals(part.denominators, part.rows))
