"""Rows of data in pieces: which one comes when, where an epoch is entered, and which process reads it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortflex_core import (
    Batches,
    Columns,
    DataError,
    Pieces,
    ThreadGroup,
    Trainer,
    Unsupported,
    hook,
    run_ranks,
    usual_buffer,
)
from ortflex_core.kernel.batches import Epoch
from ortflex_core.training.data.pieces import Conversion, PieceBatches, head, rows_of
from ortflex_core.training.data.shuffle_buffer import Part, fill_buffers
from tests.core.test_process_groups import equal, outcome, refused, results, training
from tests.training import plugins

pytestmark = pytest.mark.per_python

# The shuffle buffer -------------------------------------------------------------------------------


class Runs(Pieces):
    """Pieces of consecutive numbers, read a few rows at a time."""

    def __init__(self, sizes: Sequence[int], buffer: int, chunk: int = 3) -> None:
        self._sizes, self._buffer, self._chunk = sizes, buffer, chunk
        self.reads: list[tuple[int, int]] = []

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes

    @property
    def buffer(self) -> int:
        return self._buffer

    def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
        self.reads.append((piece, start))
        before = sum(self._sizes[:piece])
        rows = np.arange(before + start, before + self._sizes[piece], dtype=np.float64)
        for at in range(0, len(rows), self._chunk):
            yield Columns(inputs={"X": rows[at : at + self._chunk, None]})

    def place(self, piece: int) -> str:
        return f"run {piece}"


PLAIN = Conversion(prepare=lambda columns: dict(columns.inputs), denominators=lambda columns: [1.0])
WEIGHTED = Conversion(
    prepare=lambda columns: dict(columns.inputs),
    denominators=lambda columns: [1.0, columns["X"][:, 0] / 7],
)


def epoch(source: PieceBatches, seed: int | None, at_once: int = 1, start: int = 0) -> list[Any]:
    rng = None if seed is None else np.random.default_rng(seed)
    return [b for group in source.batches(Epoch(rng, at_once, start)) for b in group]


def rows_in(batches: Sequence[Any]) -> list[list[int]]:
    return [batch.array("X")[:, 0].astype(int).tolist() for batch in batches]


def test_the_order_is_the_documented_one() -> None:
    sizes, buffer = [4, 5, 2, 6, 3], 8
    got = np.concatenate(rows_in(epoch(PieceBatches(Runs(sizes, buffer), PLAIN, 3), seed=5)))
    rng = np.random.default_rng(5)
    starts = np.cumsum([0, *sizes])
    end_to_end = np.concatenate([np.arange(starts[p], starts[p + 1]) for p in rng.permutation(5)])
    key = int(rng.integers(2**63))
    wanted = []
    for number, start in enumerate(range(0, 20, buffer)):
        rows = end_to_end[start : start + buffer]
        order = np.arange(len(rows))
        np.random.default_rng([key, number]).shuffle(order)
        wanted += rows[order].tolist()
    assert got.tolist() == wanted


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda s: sum(s) > 0),
    buffer=st.integers(1, 12),
    batch=st.integers(1, 7),
    at_once=st.integers(1, 4),
    seed=st.none() | st.integers(0, 3),
    data=st.data(),
)
def test_an_epoch_has_every_row_once_and_can_be_entered_anywhere(
    sizes: list[int], buffer: int, batch: int, at_once: int, seed: int | None, data: Any
) -> None:
    rows = sum(sizes)
    source = PieceBatches(Runs(sizes, buffer), WEIGHTED, batch)
    whole = epoch(source, seed)
    seen = rows_in(whole)
    assert [len(b) for b in seen] == [
        min(source.batch_size, rows - k) for k in range(0, rows, source.batch_size)
    ]
    flat = [row for b in seen for row in b]
    assert sorted(flat) == list(range(rows))
    if seed is None:
        assert flat == list(range(rows))
    for b, numbers in zip(whole, seen, strict=True):
        np.testing.assert_allclose(b.denominators, [len(numbers), sum(numbers) / 7], rtol=1e-12)
    start = data.draw(st.integers(0, source.steps))
    again = epoch(source, seed, at_once, start)
    assert rows_in(again) == seen[start:]
    for b, numbers in zip(again, seen[start:], strict=True):
        np.testing.assert_allclose(b.denominators, [len(numbers), sum(numbers) / 7], rtol=1e-12)


def test_groups_begin_at_multiples_of_their_size_wherever_an_epoch_is_entered() -> None:
    source = PieceBatches(Runs([10, 10, 10], buffer=8), PLAIN, 2)

    def lengths(start: int) -> list[int]:
        return [len(g) for g in source.batches(Epoch(np.random.default_rng(0), 4, start))]

    assert lengths(0) == [4, 4, 4, 1, 1, 1]
    assert lengths(4) == [4, 4, 1, 1, 1]
    assert lengths(6) == [1, 1, 4, 1, 1, 1]
    assert lengths(13) == [1, 1]


def test_a_buffer_has_rows_of_distant_pieces_and_epochs_differ() -> None:
    source = PieceBatches(Runs([10] * 20, buffer=50), PLAIN, 50)
    first, second = rows_in(epoch(source, 0)), rows_in(epoch(source, 1))
    assert first != second
    assert all(len({row // 10 for row in rows}) == 5 for rows in first)
    assert {row // 10 for row in first[0]} != {row // 10 for row in second[0]}


def test_entering_an_epoch_reads_no_earlier_piece() -> None:
    pieces = Runs([10] * 20, buffer=20)
    source = PieceBatches(pieces, PLAIN, 5)
    epoch(source, None, start=30)  # row 150, the middle of buffer 7
    assert pieces.reads[0] == (14, 0)


def test_the_next_epoch_is_read_while_the_last_buffer_is_in_use() -> None:
    pieces = Runs([10, 10], buffer=10)
    source = PieceBatches(pieces, PLAIN, 5)
    wanted = [rows_in(epoch(source, seed)) for seed in (0, 1)]
    pieces.reads.clear()
    first = source.batches(
        Epoch(np.random.default_rng(0), following=lambda: np.random.default_rng(1))
    )
    seen = []
    for group in first:
        seen += rows_in(group)
        time.sleep(0.05)  # the thread sees that the epoch is over
    assert seen == wanted[0]
    end = time.monotonic() + 10
    while len(pieces.reads) < 3 and time.monotonic() < end:
        time.sleep(0.001)
    # The first buffer of the second epoch is read before it is requested.
    assert len(pieces.reads) >= 3
    second = source.batches(Epoch(np.random.default_rng(1), number=1))
    assert [r for group in second for r in rows_in(group)] == wanted[1]
    assert len(pieces.reads) == 4
    source.close()
    assert not [t for t in threading.enumerate() if t.name == "ortflex-data"]


def test_rows_read_ahead_are_discarded_if_another_epoch_follows() -> None:
    source = PieceBatches(Runs([10, 10], buffer=10), PLAIN, 5)
    wanted = rows_in(epoch(source, 7))
    for group in source.batches(Epoch(following=lambda: None)):
        time.sleep(0.02 * len(group))
    again = source.batches(Epoch(np.random.default_rng(7), number=5))
    assert [r for group in again for r in rows_in(group)] == wanted
    for _ in source.batches(Epoch(following=lambda: None)):
        time.sleep(0.02)
    source.close()
    assert not [t for t in threading.enumerate() if t.name == "ortflex-data"]


def test_rows_of_different_shapes_cannot_be_mixed() -> None:
    parts = [
        Part(columns={"X": np.zeros((2, 3))}, denominators=[1.0], rows=2, where="a.npy"),
        Part(columns={"X": np.zeros((2, 4))}, denominators=[1.0], rows=2, where="b.npy"),
    ]
    with pytest.raises(DataError, match=r"b\.npy: the rows of 'X' have shape \[4\], those of a\.n"):
        list(fill_buffers(parts, 10, 0, None))


def test_a_piece_whose_number_of_rows_has_changed_is_refused() -> None:
    pieces = Runs([4, 4], buffer=3)
    source = PieceBatches(pieces, PLAIN, 2)
    pieces._sizes = [4, 3]
    source.pieces = Runs([4, 4], buffer=3)
    source.pieces.read = pieces.read  # type: ignore[method-assign]
    with pytest.raises(DataError, match="run 1 has 3 rows now, but it had 4 when it was opened"):
        epoch(source, None)


def test_the_first_rows_and_the_default_buffer() -> None:
    pieces = Runs([2, 0, 5], buffer=3, chunk=2)
    assert rows_of(pieces) == 7
    assert head(pieces, 4).inputs["X"][:, 0].tolist() == [0, 1, 2, 3]
    assert head(pieces, 100).rows == 7
    with pytest.raises(DataError, match="the data are empty: 0 rows"):
        head(Runs([0], buffer=3), 4)
    rows = usual_buffer(Columns(inputs={"X": np.zeros((4, 100), np.float32)}))
    assert rows == 64 * 2**20 // 400


# Each process reads only its own rows -------------------------------------------------------------


rng = np.random.default_rng(8)
ROWS, SIZE = 1001, 8
X = rng.standard_normal((ROWS, 6)).astype(np.float32)
Y = rng.standard_normal((ROWS, 1)).astype(np.float32)
WEIGHT = rng.uniform(0.1, 3, ROWS)
CHUNK = 4


class Counted(Pieces):
    """Pieces of 37 rows that count what is read of them."""

    sizes = [37] * 27 + [2]
    buffer = 100

    def __init__(self, weighted: bool = True) -> None:
        self.weighted, self.read_rows, self.counting = weighted, 0, True

    def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
        before = 37 * piece
        for at in range(before + start, before + self.sizes[piece], CHUNK):
            rows = slice(at, min(at + CHUNK, before + self.sizes[piece]))
            self.read_rows += self.counting * (rows.stop - rows.start)
            weights = {"sample_weight": WEIGHT[rows].astype(np.float32)} if self.weighted else {}
            yield Columns(inputs={"X": X[rows]}, labels={"label": Y[rows]}, weights=weights)

    def place(self, piece: int) -> str:
        return f"piece {piece}"


Counted.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("size", "per_rank", "weighted"), [(2, 1, True), (4, 1, False), (3, 2, True)]
)
def test_several_processes_train_on_pieces_as_one_process_does(
    size: int, per_rank: int, weighted: bool
) -> None:
    equal(size, (Counted(weighted),), per_rank, optimizer="adam", epochs=2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_process_reads_its_share(size: int) -> None:
    """Of three epochs; at the ends of a share a chunk may be read by two of them."""

    def job(group: ThreadGroup) -> int:
        data = Counted()
        data.counting = False

        class Counts:
            every_rank = True

            @hook
            def train_start(self) -> None:
                data.counting, data.read_rows = True, 0

        training(distributed=group, callbacks=[Counts()], epochs=3).fit(data)
        return data.read_rows

    counts = results(run_ranks(size, job))
    assert all(abs(n / 3 - ROWS / size) <= SIZE + 2 * CHUNK for n in counts), counts
    assert 3 * ROWS <= sum(counts) <= 3 * (ROWS + 2 * CHUNK * size)


@pytest.mark.parametrize("streams", [1, 2, 5, 200])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_streams_have_every_row_once_and_can_be_entered_anywhere(streams: int, start: int) -> None:
    """Batches are whole but the last, whose number is what it is without streams."""

    def batches(start: int, own: tuple[int, int] = (0, 1)) -> list[Any]:
        source = PieceBatches(Counted(), PLAIN, SIZE, streams, own)
        drawn = source.batches(Epoch(np.random.default_rng(3), start=start))
        return [batch.array("X") for group in drawn for batch in group]

    whole = batches(0)
    assert [len(b) for b in whole] == [SIZE] * (ROWS // SIZE) + [ROWS % SIZE]
    assert sorted(map(bytes, np.concatenate(whole))) == sorted(map(bytes, X))
    assert not np.array_equal(np.concatenate(whole), X)
    later = batches(start * streams)
    assert all(np.array_equal(a, b) for a, b in zip(later, whole[start * streams :], strict=True))
    for stream in range(min(streams, 5)):
        mine = batches(0, (stream, streams))
        assert all(np.array_equal(a, b) for a, b in zip(mine, whole[stream::streams], strict=True))


def test_a_resume_within_an_epoch_in_another_number_of_processes(tmp_path: Path) -> None:
    whole = outcome(training(accumulate=4, optimizer="adam", epochs=2), (Counted(),))
    for one in continued(4, 2, Ends(40), Counted, tmp_path, steps=1):
        assert one == whole


def test_pieces_in_order_give_the_bits_of_one_process() -> None:
    equal(2, (Counted(),), shuffle=False, epochs=1)


class Augment:
    """Draws by the number of a batch, and changes what the denominators are made of."""

    every_rank = True

    @hook
    def batch_drawn(self, batch: Any, rng: np.random.Generator) -> Any:
        factor = rng.uniform(0.5, 2)
        return {
            "X": batch["X"] * np.float32(factor),
            "sample_weight": batch["sample_weight"] * factor,
        }


@pytest.mark.parametrize("kind", ["pieces", "iterable"])
def test_hooks_change_batches_as_in_one_process(kind: str) -> None:
    source = Counted() if kind == "pieces" else by_epoch
    equal(3, (source,), 2, epochs=2, callbacks=[Augment()])


class Ends:
    """A training ends with an error after a step; it is continued from its last checkpoint."""

    every_rank = True

    def __init__(self, step: int) -> None:
        self.step = step

    @hook
    def steps_end(self, progress: Any) -> None:
        if progress.step == self.step:
            raise ZeroDivisionError("planted")


def continued(first: int, second: int, ends: Ends, data: Any, folder: Path, **saves: Any) -> Any:
    """What a training leaves that ``first`` processes began, and ``second`` ones continued."""

    def begin(group: ThreadGroup) -> None:
        saver = {"name": "checkpoint", "folder": str(folder), "best": False, **saves}
        options = {"optimizer": "adam", "epochs": 2, "callbacks": [saver, ends]}
        training(distributed=group, **options).fit(data())

    def resume(group: ThreadGroup) -> Any:
        trainer = Trainer.resume(folder, plugins=plugins(), distributed=group, callbacks=())
        return outcome(trainer, (data(),))

    run_ranks(first, begin)
    return results(run_ranks(second, resume))


# ---------------------------------------------------------------------- iterables


def batches_of(rank: int, size: int, epoch: int = 0, start: int = 0) -> Iterator[Any]:
    """Batches k with k mod size = rank of an order that all know."""
    order = np.random.default_rng(epoch).permutation(ROWS)
    for k in range(rank + start * size, -(-ROWS // SIZE), size):
        rows = order[k * SIZE : (k + 1) * SIZE]
        yield X[rows], Y[rows], WEIGHT[rows]


def by_epoch(epoch: int, start: int, rank: int, size: int) -> Iterator[Any]:
    return batches_of(rank, size, epoch, start)


def by_rank(rank: int, size: int) -> Iterator[Any]:
    return batches_of(rank, size)


@pytest.mark.parametrize("source", [by_epoch, by_rank, Batches(by_epoch, prefetch=3)])
@pytest.mark.parametrize(("size", "per_rank"), [(3, 2)])
def test_a_function_of_rank_and_size_makes_the_batches_of_a_process(
    source: Any, size: int, per_rank: int
) -> None:
    equal(size, (source,), per_rank, optimizer="adam", epochs=2)


def test_an_endless_function_has_the_steps_of_an_epoch_of_all_processes() -> None:
    def endless(rank: int, size: int) -> Iterator[Any]:
        for k in range(rank, 10_000, size):
            rows = np.random.default_rng(k).integers(0, ROWS, SIZE)
            yield X[rows], Y[rows]

    equal(2, (endless,), fit={"steps_per_epoch": 9}, epochs=1)
    equal(2, (endless,), fit={"steps_per_epoch": 8}, epochs=3)


def test_an_iterable_resumes_within_an_epoch(tmp_path: Path) -> None:
    def straight(group: ThreadGroup) -> Any:
        return outcome(training(distributed=group, optimizer="adam", epochs=2), (by_epoch,))

    whole = results(run_ranks(3, straight))
    assert continued(3, 3, Ends(50), lambda: by_epoch, tmp_path, steps=7) == whole

    def other(group: ThreadGroup) -> Any:
        changes = {"distributed": group, "accumulate": 3, "callbacks": ()}
        return Trainer.resume(tmp_path, plugins=plugins(), strict=False, **changes).fit(by_epoch)

    refused(run_ranks(1, other), DataError)


def test_processes_with_other_numbers_of_batches_end_an_epoch_together(caplog: Any) -> None:
    def uneven(rank: int, size: int) -> Sequence[Any]:
        return list(batches_of(rank, size))[: 20 + 5 * rank]

    def job(group: ThreadGroup) -> Any:
        return outcome(training(distributed=group, epochs=2), (Batches(uneven),))

    with caplog.at_level(logging.WARNING, "ortflex"):
        first, second = results(run_ranks(2, job))
    assert first == second
    assert first["history"]["rows"] == [40 * SIZE] * 2
    assert "the processes have different numbers of batches" in caplog.text


def test_an_iterable_without_rank_and_size_is_refused() -> None:
    for source in ([(X, Y), (X, Y)], lambda epoch: iter([(X, Y)])):
        out = run_ranks(2, lambda g, s=source: training(distributed=g).fit(s))
        refused(out, Unsupported, "has rank and size among its arguments")


def test_local_steps_of_pieces_and_iterables() -> None:
    for source in (Counted, lambda: by_epoch):

        def job(group: ThreadGroup, source: Any = source) -> Any:
            return outcome(training(distributed=group, sync_every=4, epochs=2), (source(),))

        first, second = results(run_ranks(2, job))
        assert first == second
