"""The shuffle buffer: which row comes when, and that an epoch can be entered anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortflex_core import Columns, DataError, Pieces, usual_buffer
from ortflex_core.kernel.batches import Epoch
from ortflex_core.training.data.pieces import Conversion, PieceBatches, head, rows_of
from ortflex_core.training.data.shuffle_buffer import Part, fill_buffers

pytestmark = pytest.mark.per_python


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
