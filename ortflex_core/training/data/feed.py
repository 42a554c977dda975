"""The data given to a Trainer: arrays, data that are read in pieces, iterables of batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import attrs

from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.batches import ArrayBatches, Batch, Epoch, Lasting, Source, totals
from ortflex_core.kernel.component import expected_count, is_count
from ortflex_core.kernel.engine_protocols import DataSource
from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.step_protocols import Loss
from ortflex_core.kernel.types import Array, Size
from ortflex_core.training.data import single_rows
from ortflex_core.training.data.columns import Columns, split
from ortflex_core.training.data.derived_pieces import store
from ortflex_core.training.data.iterables import Batches, IterableBatches, gives_batches
from ortflex_core.training.data.opening import load
from ortflex_core.training.data.pieces import (
    Conversion,
    Parts,
    PieceBatches,
    Pieces,
    head,
    read_if_small,
    rows_of,
)
from ortflex_core.training.data.preparation import Preparation
from ortflex_core.training.data.ranks import RankBatches
from ortflex_core.training.data.rows import gives_rows, has_three, reading, stacked
from ortflex_core.training.engines.peers import Peers

_log = logging.getLogger("ortflex")

Convert = Callable[[Any, Any, Any], Columns]
"""Converts X, y and sample weights to columns and encodes the labels."""


@attrs.frozen
class Feed:
    """Data of any form, before they are prepared for a problem.

    Attributes:
        given: the data.
        first: the rows that define the types of labels and weights.
        size: the usual batch size and the length of an epoch.
        convert: converts the user's arrays to columns.
        three: whether rows or batches have a third part, which only its place makes a weight.
    """

    given: Columns | Pieces | IterableBatches
    first: Columns
    size: Size
    convert: Convert
    three: bool = False

    @classmethod
    def of(
        cls,
        X: Any,
        y: Any,
        sample_weight: Any,
        convert: Convert,
        *,
        batch_size: int,
        limit: int | None = None,
        labeled: bool = True,
        peers: Peers | None = None,
    ) -> Feed:
        """Open the data of a user.

        ``limit`` is the number of batches in an epoch of an endless iterable; without ``labeled``,
        an iterable may yield X alone. With ``peers``, an iterable yields the batches of this
        process, and ``limit`` counts the batches of all processes.
        """
        if limit is not None and not is_count(limit):
            raise DataError(f"steps_per_epoch: {expected_count(limit)}")
        if isinstance(X, DataSource):
            X = load(X, labeled=labeled)
        if isinstance(X, Pieces):
            X = read_if_small(X)
        three = False
        if y is None and gives_rows(X):
            three = len(X) > 0 and has_three(X[0])
            X, y, sample_weight = stacked(X)
        if limit is not None and not gives_batches(X, y):
            raise DataError(
                "steps_per_epoch is the length of an epoch of an endless iterable, but these "
                f"data are finite; leave it out (got {limit!r})"
            )
        if isinstance(X, Pieces):
            rows = min(batch_size, rows_of(X))
            first = convert(head(X, rows), None, None)
            return cls(X, first, Size(rows=rows, epoch_steps=rows_of(X) // rows), convert)
        # A list may be meant as rows or as batches.
        if gives_batches(X, y) and (labeled or not isinstance(X, Sequence)):
            own = X if isinstance(X, Batches) else Batches(X, prefetch=0)
            ranks = (0, 1) if peers is None else (peers.rank, peers.size)
            if limit is not None:
                limit = len(range(ranks[0], limit, ranks[1]))
            given = IterableBatches(own, convert, limit, batch_size, labeled, ranks)
            buffered = Size(rows=batch_size, epoch_steps=limit)
            rows = given.first.rows
            if peers is not None and not own.buffer:
                # The usual size chooses graphs, so it is that of the first batch of all processes.
                rows = peers.values("rows of the first batch", rows)[0]
            size = buffered if own.buffer else Size(rows=rows, epoch_steps=1)
            return cls(given, given.first, size, convert, given.three)
        with reading(three):
            columns = convert(X, y, sample_weight)
        return attrs.evolve(cls.of_columns(columns, batch_size), three=three)

    @classmethod
    def of_columns(cls, columns: Columns, batch_size: int) -> Feed:
        """Columns whose names and labels need no conversion."""
        rows = min(batch_size, columns.rows)
        size = Size(rows=rows, epoch_steps=columns.rows // rows)
        return cls(columns, columns, size, lambda X, y, weight: X)

    @property
    def rows(self) -> int | None:
        """The number of rows of an epoch; None for an iterable."""
        if isinstance(self.given, IterableBatches):
            return None
        return self.given.rows if isinstance(self.given, Columns) else rows_of(self.given)

    @property
    def numbered(self) -> bool:
        """Whether the user made the batches, so that the number of a batch says which one it is."""
        return isinstance(self.given, IterableBatches) and not self.given.buffered

    def head(self, rows: int) -> Columns:
        """All rows of arrays, the first rows of data that are read in pieces."""
        if isinstance(self.given, Pieces):
            return self._convert_columns(head(self.given, rows))
        return self.first

    def split(self, fraction: float, seed: int, *, stratify: bool = False) -> tuple[Feed, Feed]:
        """Training rows and validation rows, with ``stratify`` of the same classes.

        Raises:
            DataError: the data are not all in memory, one of the two would be empty, or the rows have no
                classes.
        """
        if not isinstance(self.given, Columns):
            iterable = isinstance(self.given, IterableBatches)
            what = "an iterable" if iterable else "data that do not fit into the shuffle buffer"
            raise DataError(
                f"{what} cannot be split into training and validation rows; pass "
                "validation_data=(X, y) or a separate source"
            )
        train, held = split(self.given, fraction, seed, stratify=stratify)
        feeds = (Feed.of_columns(part, self.size.rows) for part in (train, held))
        first, second = (attrs.evolve(feed, three=self.three) for feed in feeds)
        return first, second

    def source(
        self,
        preparing: Preparation,
        batch_size: int,
        *,
        shuffle: bool = True,
        peers: Peers | None = None,
        limit: int | None = None,
        drop_last: bool = False,
    ) -> Source:
        """Batches to train on; with ``peers``, each process reads only its own if possible.

        ``shuffle`` says whether the rows are shuffled, ``drop_last`` leaves out a last batch with fewer
        rows, ``limit`` is as for :meth:`of`.

        Raises:
            DataError: the data do not fit the problem, the batches do not fit a fixed batch dimension, a
                batch has a single row for a BatchNormalization, or ``drop_last`` for an iterable that
                decides its batches.
        """
        given = self.given
        together = preparing.problem.updating.accumulate
        source: Source
        if isinstance(given, IterableBatches):
            given.use(_conversion(preparing))
            if drop_last and not given.buffered:
                raise DataError(
                    "drop_last: these data are an iterable, which decides its batches; leave a short last "
                    "batch out there (a torch DataLoader has drop_last=True), or pass Batches(source, "
                    "buffer=10_000), which makes batches of batch_size rows"
                )
            given.drop_last = drop_last
            source = single_rows.watched(preparing.problem, given)
            if peers is not None:
                source = RankBatches(source, peers, together, limit, None)
        elif isinstance(given, Pieces):
            conversion = _conversion(preparing, self._convert_columns)
            peers = peers if shuffle else None
            own = (0, 1) if peers is None else (peers.rank, peers.size)
            streams = together if shuffle else 1
            parts = _stored(preparing, given, conversion)
            source = pieces = PieceBatches(
                given, conversion, batch_size, streams, own, drop_last, parts
            )
            if peers is not None:
                source = RankBatches(pieces, peers, together, pieces.steps, pieces.rows)
        else:
            prepared = Lasting(preparing.columns(given))
            denominators = preparing.denominators(prepared)
            derivation = preparing.derivation
            columns = prepared
            if derivation is not None and derivation.once:
                columns = derivation.of_all(prepared)
            source = ArrayBatches(columns, denominators, batch_size, drop_last, prepared)
        _check_sizes(source, preparing.problem.model, batch_size)
        single_rows.check_source(preparing.problem, source, batch_size)
        return source

    def labeled(
        self, preparing: Preparation, *, keep: bool = False
    ) -> Callable[[], Iterable[Batch]]:
        """A function that yields consecutive batches with their labels; every call starts at the first.

        ``keep`` says whether derived columns are kept, for several calls.
        """
        given, derivation = self.given, preparing.derivation
        if isinstance(given, Columns):
            size = chunk_size(preparing.problem, given.rows)
            prepared: Mapping[str, Array] = preparing.columns(given)
            denominators = preparing.denominators(prepared)
            if derivation is None:
                batches = slices(prepared, given.rows, size, denominators)
                return lambda: batches
            if keep and derivation.once:
                batches = slices(derivation.of_all(prepared), given.rows, size, denominators)
                return lambda: batches
            size = derivation.at_once(prepared, given.rows)
            batches = slices(prepared, given.rows, size, denominators)
            return lambda: map(derivation.batch, batches)
        conversion = _conversion(preparing, self._convert_columns)
        drawn = partial(self._consecutive, conversion, preparing)
        if keep and isinstance(given, Pieces):
            parts = _stored(preparing, given, conversion, needed=False)
            if parts is not None:
                return partial(drawn, parts=parts)
        return lambda: map(preparing.derived, drawn())

    def inputs(self, preparing: Preparation, largest: int | None = None) -> Iterator[Batch]:
        """Consecutive batches without labels, for predictions; of at most ``largest`` rows if given."""
        given = self.given
        if isinstance(given, Columns):
            size = _at_most(largest, chunk_size(preparing.problem, given.rows))
            return iter(slices(preparing.inputs(given), given.rows, size, []))
        conversion = Conversion(prepare=preparing.inputs, denominators=lambda columns: [])
        if isinstance(given, Pieces):
            conversion = attrs.evolve(conversion, convert=self._convert_columns)
        return self._consecutive(conversion, preparing, largest)

    def _consecutive(
        self,
        conversion: Conversion,
        preparing: Preparation,
        largest: int | None = None,
        parts: Parts | None = None,
    ) -> Iterator[Batch]:
        source: Source
        if isinstance(self.given, Pieces):
            size = _at_most(largest, chunk_size(preparing.problem, rows_of(self.given)))
            source = PieceBatches(self.given, conversion, size, parts=parts)
        else:
            assert isinstance(self.given, IterableBatches)
            self.given.use(conversion)
            source = self.given
        with closing(source.batches(Epoch())) as groups:  # type: ignore[type-var]  # a generator
            for group in groups:
                yield from group

    def _convert_columns(self, columns: Columns) -> Columns:
        return self.convert(columns, None, None)


def _at_most(largest: int | None, size: int) -> int:
    return size if largest is None else min(largest, size)


def _conversion(
    preparing: Preparation, convert: Callable[[Columns], Columns] = lambda columns: columns
) -> Conversion:
    return Conversion(
        prepare=preparing.columns, denominators=preparing.denominators, convert=convert
    )


def _stored(
    preparing: Preparation, pieces: Pieces, conversion: Conversion, *, needed: bool = True
) -> Parts | None:
    """What reads the rows of pieces from columns that are computed once; None if they are not.

    ``needed`` is as for :func:`ortflex_core.training.data.derived_pieces.store`.
    """
    derivation = preparing.derivation
    if derivation is None or not derivation.once:
        return None
    terms = preparing.problem.terms
    labels = [
        (_labels(t.loss), t.loss.scores, t.label, t.label_key, t.weight, t.weight_key)
        for t in terms
    ]
    labeled = repr((labels, derivation.classes))
    stores = store(derivation, pieces, conversion, labeled, needed=needed)
    return None if stores is None else stores.parts


def _labels(loss: Loss) -> list[tuple[str, str]]:
    """What the labels that a loss accepts depend on: its name and its settings, without a teacher."""
    plain = (bool, int, float, str, tuple, list, type(None))
    return [(n, repr(v)) for n, v in loss.describe().items() if isinstance(v, plain)]


def _check_sizes(source: Source, model: Model, batch_size: int) -> None:
    rows = source.rows
    if rows is None:
        return
    size = min(batch_size, rows)
    if size < batch_size:
        _log.info("batch_size %d is reduced to %d, the number of rows", batch_size, rows)
    check_batch(model, size)
    if model.fixed_batch is not None and rows % size:
        raise DataError(_fixed_batch(model, f"{rows} rows leave a last batch of {rows % size}"))


def check_batch(model: Model, size: int) -> None:
    """Refuse batches of another size than a fixed batch dimension."""
    if model.fixed_batch is not None and model.fixed_batch[1] != size:
        raise DataError(_fixed_batch(model, f"a batch has {size} rows"))


def _fixed_batch(model: Model, problem: str) -> str:
    assert model.fixed_batch is not None
    spec, fixed = model.fixed_batch
    return (
        f"the input {spec} has a fixed batch dimension, and {problem}; pass free_batch=True, or "
        f"batch_size={fixed} with a multiple of {fixed} rows, or export the model with a dynamic batch "
        "dimension"
    )


def held_out(given: Any, labeled: bool = True) -> tuple[Any, Any, Any]:
    """``validation_data`` as X, y and sample_weight; without ``labeled``, also X alone."""
    if isinstance(given, tuple | list) and len(given) in (2, 3) and not _batch_list(given):
        X, y, sample_weight = (*given, None)[:3]
        return X, y, sample_weight
    if isinstance(given, DataSource | Columns | Pieces | Mapping) or (
        gives_rows(given)
        or gives_batches(given, None)
        or (not labeled and hasattr(given, "__array__"))
    ):
        return given, None, None
    kind = f"{given!r}" if isinstance(given, int | str) else type(given).__name__
    kind = f"{kind} of {len(given)}" if isinstance(given, tuple | list) else kind
    raise DataError(
        "validation_data: expected (X, y), (X, y, sample_weight), a data source, an iterable of "
        f"batches or a fraction > 0 and < 1, got {kind}"
    )


def _batch_list(given: Sequence[Any]) -> bool:
    """Whether this is a list of batches, not a single batch."""
    return isinstance(given, list) and all(isinstance(g, tuple) and len(g) in (2, 3) for g in given)


# Rows of a batch: enough for speed, few enough for memory.
_CHUNK = 1024


def chunk_size(problem: Problem, rows: int) -> int:
    """The rows that are evaluated at a time: a fixed batch dimension, or the size of training batches."""
    fixed = [i.shape[0] for i in problem.model.inputs if i.shape and isinstance(i.shape[0], int)]
    if fixed and rows % fixed[0]:
        raise DataError(
            f"the model has a fixed batch dimension of {fixed[0]}, and {rows} rows are not a "
            "multiple of it; pass a multiple of it, or create the Trainer with free_batch=True"
        )
    if any(term.tensors for term in problem.terms):
        return fixed[0] if fixed else problem.batch_size  # pairs of a batch; boxes and anchors
    return fixed[0] if fixed else max(_CHUNK, problem.batch_size)


def slices(
    columns: Mapping[str, Array], rows: int, size: int, denominators: Sequence[float | Array]
) -> list[Batch]:
    """Consecutive rows, ``size`` at a time; views, not copies."""
    out = []
    for start in range(0, rows, size):
        part = {name: array[start : start + size] for name, array in columns.items()}
        count = min(size, rows - start)
        of_part = totals(denominators, count, slice(start, start + size))
        out.append(Batch(part, None, count, of_part))
    return out
