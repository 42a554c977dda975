"""Batches that another author makes: as they are, mixed in a buffer, drawn ahead; to look at, too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, Columns, DataError
from ortflex_core.kernel.batches import Epoch
from ortflex_core.training.data.iterables import IterableBatches
from ortflex_core.training.data.pieces import Conversion
from tests import models
from tests.training import make, regression, same

pytestmark = pytest.mark.per_python

CONVERSION = Conversion(
    prepare=lambda columns: dict(columns.inputs), denominators=lambda columns: [1.0]
)


def numbers(sizes: list[int], first: int = 0) -> list[Any]:
    """Batches of consecutive numbers."""
    ends = np.cumsum([first, *sizes])
    return [(np.arange(a, b, dtype=float)[:, None], None) for a, b in pairwise(ends)]


def open_(source: Any, *, limit: int | None = None, size: int = 4, **options: Any) -> Any:
    def convert(X: Any, y: Any, weight: Any) -> Columns:
        return Columns(inputs={"X": np.asarray(X)})

    made = IterableBatches(Batches(source, **options), convert, limit, size)
    made.use(CONVERSION)
    return made


def epoch(source: Any, number: int = 0, seed: int | None = 0, at_once: int = 1) -> list[list[int]]:
    rng = None if seed is None else np.random.default_rng([seed, number])
    groups = source.batches(Epoch(rng, at_once, number=number))
    return [b.array("X")[:, 0].astype(int).tolist() for group in groups for b in group]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_without_a_buffer_batches_are_not_changed(prefetch: int) -> None:
    source = open_(numbers([3, 1, 4]), prefetch=prefetch)
    for number in range(2):
        assert epoch(source, number) == [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert source.steps == 3


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_buffer_mixes_rows_into_batches_of_the_trainer_s_size(prefetch: int) -> None:
    source = open_(numbers([3, 1, 4, 7, 5]), buffer=8, prefetch=prefetch)
    first, second = epoch(source), epoch(source, 1)
    assert [len(b) for b in first] == [4, 4, 4, 4, 4]
    for seen in (first, second):
        assert sorted(row for b in seen[:2] for row in b) == list(range(8))
        assert sorted(row for b in seen[2:4] for row in b) == list(range(8, 16))
        assert sorted(seen[4]) == list(range(16, 20))
    assert first != second
    assert first == epoch(open_(numbers([3, 1, 4, 7, 5]), buffer=8, prefetch=0))
    assert epoch(source, 2, seed=None) == [list(range(k, k + 4)) for k in range(0, 20, 4)]


def forever() -> Iterator[Any]:
    k = 0
    while True:
        yield np.arange(k, k + 3, dtype=float)[:, None], None
        k += 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_endless_source_continues_where_the_last_epoch_ended(prefetch: int) -> None:
    source = open_(forever, limit=5, size=4, buffer=9, prefetch=prefetch)
    for number in range(3):
        seen = epoch(source, number)
        assert [len(b) for b in seen] == [4] * 5
        rows = range(20 * number, 20 * number + 20)
        flat = [row for b in seen for row in b]
        assert sorted(flat) == list(rows)
        assert sorted(flat[:9]) == list(rows[:9])  # the first buffer
    plain = open_(forever, limit=2, prefetch=prefetch)
    assert epoch(plain) == [[0, 1, 2], [3, 4, 5]]
    assert epoch(plain, 1) == [[6, 7, 8], [9, 10, 11]]


def test_data_that_end_within_an_epoch_begin_again_in_the_next() -> None:
    source = open_(numbers([2, 2, 2]), limit=2)
    assert [epoch(source, k) for k in range(4)] == [
        [[0, 1], [2, 3]],
        [[4, 5]],
        [[0, 1], [2, 3]],
        [[4, 5]],
    ]
    exact = open_(numbers([2, 2]), limit=2)
    assert [epoch(exact, k) for k in range(2)] == [[[0, 1], [2, 3]]] * 2


def test_a_function_gets_the_epoch_and_the_start() -> None:
    calls: list[Any] = []

    def draw(epoch: int, start: int) -> Iterator[Any]:
        calls.append((epoch, start))
        yield from numbers([2, 2], first=100 * epoch)[start:]

    source = open_(draw)
    assert epoch(source, 0) == [[0, 1], [2, 3]]
    assert epoch(source, 1) == [[100, 101], [102, 103]]
    assert calls == [(0, 0), (1, 0)]


@pytest.mark.parametrize("buffer", [0, 6])
def test_a_source_may_write_its_batches_into_one_array(buffer: int) -> None:
    def draw() -> Iterator[Any]:
        array = np.zeros((2, 1))
        for k in range(6):
            array[:] = k
            yield array, None

    seen = epoch(open_(draw, buffer=buffer, prefetch=4, size=2))
    assert sorted(row for b in seen for row in b) == sorted([*range(6)] * 2)


def test_batches_of_different_shapes_train_unless_a_buffer_mixes_them() -> None:
    batches = [(np.zeros((2, 3)), None), (np.zeros((2, 5)), None)]
    assert len(epoch(open_(batches))) == 2
    with pytest.raises(
        DataError, match=r"^batch 1: the rows of 'X' have shape \[5\], those of bat"
    ):
        epoch(open_(batches, buffer=3))


def test_objects_that_yield_no_batches_are_refused() -> None:
    with pytest.raises(TypeError, match="expected an iterable or a function, got int"):
        Batches(3)  # type: ignore[arg-type]
    for wrong in (-1, 2.0, True):
        with pytest.raises(ValueError, match=r"Batches\.buffer: expected an integer >= 0"):
            Batches([], buffer=wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the data are empty: the iterable yields no batches"):
        open_([])
    used = open_(iter(numbers([2])))
    assert epoch(used, 0) == [[0, 1]]
    with pytest.raises(DataError, match="exhausted after one epoch; pass a list"):
        epoch(used, 1)


# ---------------------------------------------------------------------- in a Trainer


def parts(x: Any, y: Any, size: int = 7) -> list[Any]:
    return [(x[k : k + size], y[k : k + size]) for k in range(0, len(x), size)]


def test_a_buffer_of_all_rows_trains_in_its_documented_order() -> None:
    x, y = regression(rows=40)
    trainer = make(models.linear(), epochs=2, batch_size=8, learning_rate=0.05)
    trainer.fit(Batches(parts(x, y), buffer=100))
    own = make(models.linear(), epochs=1, batch_size=8, learning_rate=0.05, shuffle=False)
    for number in range(2):
        key = int(np.random.default_rng([0, 0, number]).integers(2**63))
        order = np.arange(40)
        np.random.default_rng([key, 0]).shuffle(order)
        own.fit(x[order], y[order])
    same(trainer.get_state(), own.get_state(), 1e-6)


def test_validation_evaluation_and_predictions_take_batches() -> None:
    x, y = regression(rows=40)
    held = parts(*regression(rows=30, seed=2))
    trainer = make(models.linear(), epochs=3, learning_rate=0.05, metrics=["mae"])
    history = trainer.fit(x, y, validation_data=Batches(lambda: iter(held)))
    whole = regression(rows=30, seed=2)
    wanted = trainer.evaluate(*whole)
    assert history["validation_loss"][-1] == pytest.approx(wanted["loss"], rel=1e-6)
    assert history["validation_mae"][-1] == pytest.approx(wanted["mae"], rel=1e-6)
    for given in (held, Batches(held), lambda: iter(held)):
        assert trainer.evaluate(given) == pytest.approx(wanted, rel=1e-6)
    again = make(models.linear(), epochs=1).fit(x, y, validation_data=held)
    assert len(again["validation_loss"]) == 1
    predicted = trainer.predict(whole[0])
    for source in (
        Batches(held),
        (a for a, _ in held),
        ((a,) for a, _ in held),
        lambda: iter(held),
    ):
        np.testing.assert_allclose(trainer.predict(source), predicted, rtol=1e-6)


def test_an_iterable_cannot_be_split() -> None:
    x, y = regression()
    with pytest.raises(
        DataError,
        match="an iterable cannot be split into training and validation rows; pass validation_data=",
    ):
        make(models.linear()).fit(parts(x, y), validation_data=0.2)


def test_several_steps_per_run_give_the_result_of_single_steps() -> None:
    x, y = regression(rows=96, features=6)
    states = []
    for steps in (1, 4):
        trainer = make(
            models.mlp(), epochs=2, batch_size=4, backend={"name": "fused", "steps_per_run": steps}
        )
        trainer.fit(Batches(parts(x, y), buffer=30))
        states.append(trainer.get_state())
    same(states[0], states[1], 1e-6)
