"""Batches: the shuffle order of an epoch, and its rows in the form that engines take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, overload

import attrs
import numpy as np

from ortflex_core.kernel.digests import of_columns
from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array

Following = Callable[[], np.random.Generator | None]
"""Creates the generator of the next epoch."""


@attrs.frozen
class Epoch:
    """One epoch of a source, and the form of its batches.

    ``rng`` shuffles the rows; None keeps their order. Batches are in groups of ``at_once`` with the same
    size; those that fill no group are single. ``start`` batches are left out at the beginning. The
    ``number`` counts from 0; ``following`` is given if another epoch follows, so that a source can read
    ahead.
    """

    rng: np.random.Generator | None = None
    at_once: int = 1
    start: int = 0
    number: int = 0
    following: Following | None = None


class Lasting(dict[str, Array]):
    """Columns that do not change during training, so that a device may keep copies."""


class Batch:
    """Some rows of checked columns.

    Attributes:
        columns: arrays by the name of the graph input they feed.
        rows: the row numbers as an array; None means all rows, in order.
        size: the number of rows.
        denominators: for each loss term, the denominator of Σ w·l for the reduction "mean".
    """

    __slots__ = ("columns", "denominators", "rows", "size")

    def __init__(
        self,
        columns: Mapping[str, Array],
        rows: Array | None,
        size: int,
        denominators: Sequence[float],
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.size = size
        self.denominators = denominators

    def copy(self, name: str, out: Array) -> None:
        """Write a column's rows into ``out``, which has their shape and type."""
        column = self.columns[name]
        if self.rows is None:
            out[...] = column
        else:
            # The mode skips a bounds check and a buffer; the rows are ours and in range.
            column.take(self.rows, axis=0, out=out, mode="clip")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a column's rows."""
        return (self.size, *self.columns[name].shape[1:])

    def array(self, name: str) -> Array:
        """A column's rows."""
        column = self.columns[name]
        return column if self.rows is None else column[self.rows]


class Block(Sequence[Batch]):
    """Several batches of the same size, their rows side by side.

    Attributes:
        columns: arrays by the name of the graph input they feed.
        rows: the row numbers of all batches, one batch after the other.
        size: rows per batch.
        denominators: for every batch, one number per loss term.
    """

    __slots__ = ("columns", "denominators", "rows", "size")

    def __init__(
        self,
        columns: Mapping[str, Array],
        rows: Array,
        size: int,
        denominators: Sequence[Sequence[float]],
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.size = size
        self.denominators = denominators

    def __len__(self) -> int:
        return len(self.denominators)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        k = range(len(self))[index]
        rows = self.rows[k * self.size : (k + 1) * self.size]
        return Batch(self.columns, rows, self.size, self.denominators[k])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one batch of a column."""
        return (self.size, *self.columns[name].shape[1:])

    def copy(self, name: str, out: Array) -> None:
        """Write the rows of all batches into ``out``."""
        self.columns[name].take(self.rows, axis=0, out=out, mode="clip")


def refuse_other_kind(position: Mapping[str, Any], kind: str) -> None:
    """Refuse to continue if the interrupted run had data of another kind, in another order."""
    was = position.get("kind", kind)
    if was != kind:
        names = {
            "arrays": "arrays, or data that fit into the shuffle buffer",
            "pieces": "files that are read piece by piece",
            "batches": "an iterable of batches",
        }
        raise DataError(
            f"the interrupted run had {names.get(was, repr(was))}, but this one has "
            f"{names[kind]}, so the order of the rows would differ; pass the same data"
        )


class Source(Protocol):
    """Batches, epoch after epoch."""

    @property
    def waited(self) -> float:
        """Seconds that steps waited for data from a background thread."""

    @property
    def steps(self) -> int | None:
        """Batches per epoch, None if unknown."""

    @property
    def rows(self) -> int | None:
        """Rows per epoch, None if unknown."""

    def batches(self, epoch: Epoch) -> Iterator[Sequence[Batch]]:
        """The batches of an epoch in groups; the iterator is closed if training ends early."""

    def sample(self) -> Batch:
        """A batch to inspect; it is still drawn later."""

    def close(self) -> None:
        """End the source: training is over, even if another epoch was announced."""

    def position(self) -> dict[str, Any]:
        """The position of the batches that were drawn last, as JSON for a checkpoint."""

    def resume(self, position: Mapping[str, Any]) -> None:
        """Before the first epoch: continue after the batch that was drawn last; other data are refused."""


class ArrayBatches:
    """Batches of columns in memory (or mapped into it), shuffled without replacement.

    The columns are checked. A denominator is one number for all rows, or an array with one per row.
    ``drop_last`` leaves out a last batch that is shorter; ``rows`` are those of an epoch. ``origin`` are
    the columns that identify the data in a checkpoint, if the others are computed from them.
    """

    def __init__(
        self,
        columns: Mapping[str, Array],
        denominators: Sequence[float | Array],
        batch_size: int,
        drop_last: bool = False,
        origin: Mapping[str, Array] | None = None,
    ) -> None:
        self.waited = 0.0  # arrays in memory cause no waiting
        self.columns = columns
        self._all = len(next(iter(columns.values())))
        self.batch_size = min(batch_size, self._all)
        self.rows = self._all - (self._all % self.batch_size if drop_last else 0)
        self._denominators = denominators
        self._starts = np.arange(0, self.rows, self.batch_size)
        self._origin = columns if origin is None else origin
        self._digests: dict[str, dict[str, Any]] = {}
        self._fixed: list[list[float]] | None = None
        if all(isinstance(d, float) for d in denominators):
            nothing = np.zeros(0, np.int64)
            self._fixed = [self._summed(d, nothing) for d in denominators]

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return len(self._starts)

    def sample(self) -> Batch:
        """A batch to inspect."""
        return next(self.batches(Epoch()))[0]

    def close(self) -> None:
        """Nothing is open."""

    def position(self) -> dict[str, Any]:
        """The kind of data, and their digests, for a checkpoint; the loop counts the batches."""
        self._digests = self._digests or of_columns(self._origin)
        return {"kind": "arrays", "columns": self._digests}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Refuse the position of a different kind of source, which has a different order."""
        refuse_other_kind(position, "arrays")

    def batches(self, epoch: Epoch) -> Iterator[Sequence[Batch]]:
        """The batches of an epoch, which has every row once, except those that are dropped."""
        rng, at_once, start = epoch.rng, epoch.at_once, epoch.start
        order = np.arange(self._all) if rng is None else rng.permutation(self._all)
        order = order[: self.rows]
        size = self.batch_size
        uniform = self._fixed is not None
        per_batch = self._fixed or [self._summed(d, order) for d in self._denominators]
        of_full_batch = [d[0] for d in per_batch]
        full = self.rows // size
        grouped = full - full % at_once if at_once > 1 else 0
        of_full_group = [of_full_batch] * at_once if grouped else []
        # The bounds of groups do not depend on where resumed training starts.
        first = min(start + -start % at_once, grouped)

        def single(k: int) -> tuple[Batch]:
            rows = order[k * size : (k + 1) * size]
            denominators = of_full_batch if uniform and k < full else [d[k] for d in per_batch]
            return (Batch(self.columns, rows, len(rows), denominators),)

        yield from map(single, range(start, first))
        for k in range(first, grouped, at_once):
            rows = order[k * size : (k + at_once) * size]
            denominators: Sequence[Sequence[float]] = of_full_group
            if not uniform:
                denominators = list(zip(*(d[k : k + at_once] for d in per_batch), strict=True))
            yield Block(self.columns, rows, size, denominators)
        yield from map(single, range(max(start, grouped), len(self._starts)))

    def _summed(self, denominator: float | Array, order: Array) -> list[float]:
        if isinstance(denominator, float):
            sizes = np.minimum(self.batch_size, self.rows - self._starts)
            return [denominator * n for n in sizes.tolist()]
        return np.add.reduceat(denominator[order], self._starts).tolist()  # type: ignore[no-any-return]


def totals(
    denominators: Sequence[float | Array], rows: int, part: slice | Array = slice(None)
) -> list[float]:
    """The denominators of a batch of ``rows`` rows; ``part`` selects them where rows differ.

    >>> totals([1.0, np.array([2.0, 0.0, 1.0])], 2, slice(1, 3))
    [2.0, 1.0]
    """
    return [d * rows if isinstance(d, float) else float(d[part].sum()) for d in denominators]


def whole_steps(groups: Iterable[Sequence[Batch]], size: int) -> Iterable[Sequence[Batch]]:
    """Groups of ``size`` batches or a multiple of them; the last of an epoch may have fewer."""
    return groups if size == 1 else _joined(groups, size)


def _joined(groups: Iterable[Sequence[Batch]], size: int) -> Iterator[Sequence[Batch]]:
    waiting: list[Batch] = []
    for group in groups:
        if len(group) > 1:
            yield group
            continue
        waiting.extend(group)
        if len(waiting) == size:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def runs_of(steps: Iterable[Sequence[Batch]], count: int) -> Iterator[Sequence[Batch]]:
    """The batches of ``count`` steps together; the last run of an epoch may have fewer."""
    iterator = iter(steps)
    while run := list(islice(iterator, count)):
        yield [batch for step in run for batch in step]


def rows_of_steps(batches: Sequence[Batch], size: int) -> Sequence[int]:
    """The rows of every step, ``size`` batches each."""
    if size == 1:
        return [batches[0].size] * len(batches)
    rows = [batch.size for batch in batches]
    return [sum(rows[k : k + size]) for k in range(0, len(rows), size)]
