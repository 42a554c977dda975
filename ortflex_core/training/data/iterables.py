"""Batches from an iterable, a function that returns one, or a torch DataLoader.

Such a source reports its own position: a function of ``(epoch, start)`` is called with another
start, an object with ``state_dict()`` and ``load_state_dict()`` gets its state back, a list is
indexed. With any other source, training is resumed only at the end of an epoch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import attrs
import numpy as np

from ortflex_core.kernel.batches import Batch, Epoch, refuse_other_kind
from ortflex_core.kernel.component import expected_count, is_count
from ortflex_core.kernel.engine_protocols import DataSource
from ortflex_core.kernel.errors import ConfigError, DataError
from ortflex_core.kernel.types import Array
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.iterable_position import Items, Spot
from ortflex_core.training.data.pieces import Conversion
from ortflex_core.training.data.prefetch import Prefetch
from ortflex_core.training.data.rows import reading
from ortflex_core.training.data.shuffle_buffer import (
    Cursor,
    Part,
    as_batch,
    cut_batches,
    draw_key,
    fill_buffers,
)


def _count(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not is_count(value, 0):
        raise ConfigError(f"Batches.{attribute.name}: {expected_count(value, 0)}")


@attrs.frozen
class Batches:
    """Batches from an iterable or a function, with a shuffle buffer and a background thread.

    ``source`` is an iterable of ``(X, y)``, ``(X, y, sample_weight)`` or mappings with these keys, or
    a function that returns one: without arguments, of ``epoch``, or of ``(epoch, start)``, which
    leaves out the first ``start`` batches; ``epoch`` counts the passes over the data from 0.

    With several processes (``distributed=``), ``source`` is a function of ``(rank, size)``, ``(epoch,
    rank, size)`` or ``(epoch, start, rank, size)``, which returns the batches of process ``rank`` of
    ``size`` processes. With one process, these arguments are 0 and 1.

    Args:
        source: the iterable or the function.
        buffer: the number of rows that are collected and shuffled before they become batches of the
            Trainer's ``batch_size``; 0 uses the batches unchanged, in their order. See
            :mod:`ortflex_core.training.data.shuffle_buffer` for the order.
        prefetch: the number of batches (or buffers) that a thread draws in advance; 0 draws each one
            when it is needed, in the training thread.

    Raises:
        ConfigError: ``buffer`` or ``prefetch`` is not a count.
        TypeError: ``source`` cannot be iterated or called.

    >>> def draw(epoch, start):
    ...     for k in range(start, 100):
    ...         rng = np.random.default_rng([epoch, k])
    ...         yield rng.random((32, 5)), rng.random((32, 1))
    >>> Batches(draw, buffer=1000).prefetch
    2
    """

    source: Iterable[Any] | Callable[..., Iterable[Any]]
    buffer: int = attrs.field(default=0, validator=_count, kw_only=True)
    prefetch: int = attrs.field(default=2, validator=_count, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not callable(self.source) and not hasattr(self.source, "__iter__"):
            raise TypeError(
                f"Batches: expected an iterable or a function, got {type(self.source).__name__}"
            )


class IterableBatches:
    """Batches of an iterable, unchanged or mixed in a shuffle buffer.

    An epoch is one pass over the iterable. ``limit`` is the number of batches per epoch of an
    endless one, in which the next epoch continues where the last one ended. ``ranks`` is the rank
    of this process and the number of processes that read batches.

    Attributes:
        first: the first batch.
        three: whether it had a third part, which only its place makes a weight.
        drop_last: leave out a last batch of fewer rows than the others; for a shuffle buffer only.
    """

    rows: int | None = None

    def __init__(
        self,
        given: Batches,
        convert: Callable[[Any, Any, Any], Columns],
        limit: int | None,
        batch_size: int,
        labeled: bool = True,
        ranks: tuple[int, int] = (0, 1),
    ) -> None:
        self.drop_last = False
        self._given = given
        self._convert = convert
        self._limit = limit
        self._size = batch_size
        self._items = Items(given.source, labeled, ranks)
        self._left: Part | None = None
        self._conversion: Conversion | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._now: tuple[Spot, int, int, int] | None = None
        self._ahead: Prefetch[Any] | None = None
        self._waited = 0.0  # until the current thread began to draw
        self.of_ranks = self._items.of_ranks
        self.steps = limit
        if limit is None and not given.buffer and hasattr(given.source, "__len__"):
            with suppress(TypeError):  # a DataLoader of an IterableDataset has no length
                self.steps = len(given.source)  # type: ignore[arg-type]  # it has __len__
        first = self._items.peek()
        if first is None:
            raise DataError("the data are empty: the iterable yields no batches")
        self.three = self._items.three
        try:
            with reading(self.three):
                self.first = convert(*first)
        except DataError as error:
            if "numbers of rows" not in str(error) and "is a single value" not in str(error):
                raise
            raise DataError(
                f"{error}. An iterable must yield batches; batch an iterable of single rows first "
                "(a DataLoader, .batch(32)), or pass arrays as fit(X, y)"
            ) from error

    def use(self, conversion: Conversion) -> None:
        """From now on batches are prepared for this problem."""
        self._conversion = conversion

    @property
    def buffered(self) -> bool:
        """Whether rows are mixed in a shuffle buffer, so that the Trainer decides the batches."""
        return bool(self._given.buffer)

    @property
    def waited(self) -> float:
        """Seconds that steps waited for data that a thread draws."""
        return self._waited + (0.0 if self._ahead is None else self._ahead.waited)

    def sample(self) -> Batch:
        """A batch to inspect; it is still drawn later."""
        assert self._conversion is not None
        return as_batch(self._conversion.part(self.first, "batch 0"))

    def close(self) -> None:
        """Close the source; a thread that draws ahead ends with its epoch."""

    def position(self) -> dict[str, Any]:
        """The position of the batch (or buffer) in use, for a checkpoint."""
        out: dict[str, Any] = {"kind": "batches", "buffer": self._given.buffer}
        if self._now is None:
            return out
        spot, epoch, window, taken = self._now
        state = spot.state
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the state_dict() of {type(self._given.source).__name__} cannot be saved in a "
                f"checkpoint, which can only hold JSON: {error}"
            ) from error
        position = {"turn": spot.turn, "item": spot.item, "offset": spot.offset, "state": state}
        out |= {"spot": position, "check": checksum(spot.columns or {})}
        return {**out, "epoch": epoch, "window": window, "taken": taken}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue from a position in the next epoch."""
        refuse_other_kind(position, "batches")
        buffer = self._given.buffer
        if position.get("buffer", buffer) != buffer:
            raise DataError(
                f"the interrupted run had buffer = {position['buffer']}, but this one has "
                f"{buffer}, so the order of the rows would differ; pass the same buffer"
            )
        self._resumed = position if "spot" in position else None

    def _return(self, position: Mapping[str, Any], same_epoch: bool) -> None:
        """Continue with the row that was next when ``position`` was written."""
        spot = Spot(**position["spot"])
        if not same_epoch and self._limit is None and not self._items.keeps_state:
            self._items.go_to(Spot(turn=spot.turn + 1))
            return
        self._items.go_to(spot)
        part = self._next()
        if part is None or checksum(part.columns) != position.get("check", checksum(part.columns)):
            what = "it ends before" if part is None else "that batch differs from the earlier one"
            raise DataError(
                f"the run continues at batch {spot.item} of the iterable, but {what}. An "
                "exact continuation needs the same batches: pass the same data (with a seed if "
                "they are random), or fit a Trainer without a checkpoint"
            )
        if same_epoch and self._given.buffer:  # the whole buffer is needed again
            self._left = part.cut(spot.offset, part.rows)
            return
        self._drop(part, spot.offset + position["taken"])
        if not same_epoch and self._limit is None:
            while self._items.draw() is not None:
                pass  # the batches that the finished epoch left
            self._left = None
            self._items.turn_over()

    def _drop(self, part: Part | None, rows: int) -> None:
        while part is not None and rows >= part.rows:
            rows -= part.rows
            part = self._next() if rows else None
        self._left = part.cut(rows, part.rows) if part is not None else None

    def batches(self, epoch: Epoch) -> Iterator[Sequence[Batch]]:
        """The batches of one epoch; without a buffer the source decides the order."""
        position, self._resumed = self._resumed, None
        buffer, size = self._given.buffer, self._size
        same_epoch = position is not None and bool(epoch.start)
        first, taken = 0, 0
        if position is not None and same_epoch:
            first, taken = position["window"], position["taken"]
        budget: int | None = None
        if self._limit is not None:
            budget = self._limit * size - first * buffer if buffer else self._limit - epoch.start
        parts = self._parts(position, same_epoch, budget)
        if not buffer:
            with closing(self._drawn(lambda: parts)) as drawn:
                for part in drawn:
                    self._now = (part.mark, epoch.number, 0, part.rows)
                    yield (as_batch(part),)
            return
        key = draw_key(epoch.rng)
        done = epoch.start
        with closing(self._drawn(lambda: fill_buffers(parts, buffer, first, key))) as drawn:
            cursor = Cursor(drawn, taken)
            for group in cut_batches(cursor, size, epoch.at_once, epoch.start):
                if self.drop_last and group[0].size < size:
                    return
                done += len(group)
                number, mark = next(
                    (m for m in cursor.marks if m[0] == done * size // buffer), cursor.marks[-1]
                )
                self._now = (mark, epoch.number, number, done * size - number * buffer)
                yield group

    def _drawn(self, make: Callable[[], Iterator[Any]]) -> Any:
        if not self._given.prefetch:
            return make()
        self._waited = self.waited
        self._ahead = Prefetch(make, self._given.prefetch)
        return self._ahead

    def _parts(
        self, position: Mapping[str, Any] | None, same_epoch: bool, budget: int | None
    ) -> Iterator[Part]:
        """The rows of an epoch, one batch of the source at a time, up to the limit."""
        if position is not None:
            self._return(position, same_epoch)
        any_rows = same_epoch
        again = False
        while budget is None or budget > 0:
            part, self._left = self._left or self._next(), None
            if part is not None:
                any_rows = True
                if budget is not None and not self._given.buffer:
                    budget -= 1
                elif budget is not None:
                    if part.rows > budget:
                        part, self._left = part.cut(0, budget), part.cut(budget, part.rows)
                    budget -= part.rows
                yield part
                continue
            self._items.turn_over()
            if any_rows:
                return
            if again:
                raise DataError(
                    "the iterable is exhausted after one epoch; pass a list, an object that can "
                    "be iterated again, or a function that returns a new iterator"
                )
            again = True

    def _next(self) -> Part | None:
        assert self._conversion is not None
        spot = self._items.spot()
        item = self._items.draw()
        if item is None:
            return None
        try:
            given = self._convert(*item)
        except DataError as error:
            raise DataError(f"batch {spot.item}: {error}") from error
        part = self._conversion.part(given, f"batch {spot.item}", spot)
        # The source may reuse the memory of this batch for the next one.
        columns = {
            name: array.copy() if any(np.may_share_memory(array, g) for _, g in given) else array
            for name, array in part.columns.items()
        }
        return attrs.evolve(part, columns=columns, mark=attrs.evolve(spot, columns=columns))


def checksum(columns: Mapping[str, Array]) -> int:
    """A checksum of rows.

    >>> checksum({"X": np.zeros(3)}) == checksum({"X": np.zeros(3)}) != checksum({"X": np.ones(3)})
    True
    """
    out = 0
    for name in sorted(columns):
        out = zlib.crc32(
            np.ascontiguousarray(columns[name]).tobytes(), zlib.crc32(name.encode(), out)
        )
    return out


def gives_batches(X: Any, y: Any) -> bool:
    """Whether X is an iterable of batches: any iterable except arrays, mappings and data sources."""
    if isinstance(X, Batches):
        return True
    if y is not None or isinstance(X, np.ndarray | Mapping | DataSource | Columns):
        return False
    if callable(X) and not hasattr(X, "__iter__"):
        return True
    if isinstance(X, Sequence):
        return bool(X) and isinstance(X[0], tuple | Mapping)
    return hasattr(X, "__iter__") and not hasattr(X, "__array__")
