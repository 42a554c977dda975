"""Batches: which rows, in which order, with which denominators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, Columns, DataError, TensorSpec, fit_to, split
from ortflex_core.kernel.batches import ArrayBatches, Epoch
from ortflex_core.training.data.columns import as_columns
from ortflex_core.training.data.iterables import IterableBatches
from ortflex_core.training.data.pieces import Conversion
from tests import models
from tests.training import make, regression, same

pytestmark = pytest.mark.per_python


def rows_of(batches: ArrayBatches, seed: int | None) -> list[list[int]]:
    rng = None if seed is None else np.random.default_rng(seed)
    return [batch.array("X")[:, 0].tolist() for [batch] in batches.batches(Epoch(rng))]


@pytest.fixture
def batches() -> ArrayBatches:
    x = np.arange(23.0).reshape(-1, 1)
    weight = np.linspace(0, 1, 23)
    return ArrayBatches({"X": x}, [1.0, weight], 5)


def test_every_row_once_an_epoch_and_the_last_batch_is_short(batches: ArrayBatches) -> None:
    found = rows_of(batches, 0)
    assert [len(b) for b in found] == [5, 5, 5, 5, 3]
    assert batches.steps == 5
    assert sorted(row for batch in found for row in batch) == list(range(23))


def test_the_order_is_the_seed_s_and_really_random(batches: ArrayBatches) -> None:
    assert rows_of(batches, 1) == rows_of(batches, 1)
    assert rows_of(batches, 1) != rows_of(batches, 2)
    assert rows_of(batches, None) == [list(range(k, min(k + 5, 23))) for k in range(0, 23, 5)]


def test_shuffled_places_are_uniform() -> None:
    batches = ArrayBatches({"X": np.arange(4.0).reshape(-1, 1)}, [1.0], 4)
    rng = np.random.default_rng(0)
    counts = np.zeros((4, 4))
    for _ in range(2000):
        [[batch]] = batches.batches(Epoch(rng))
        counts[np.arange(4), batch.rows] += 1
    # 500 expected, standard deviation 19.4.
    assert abs(counts - 500).max() < 5 * 19.4


def test_denominators_follow_the_rows(batches: ArrayBatches) -> None:
    weight = np.linspace(0, 1, 23)
    for [batch] in batches.batches(Epoch(np.random.default_rng(3))):
        count, weights = batch.denominators
        assert count == batch.size == len(batch.rows)
        np.testing.assert_allclose(weights, weight[batch.rows].sum(), rtol=1e-12)


def test_a_batch_copies_its_rows_into_memory_that_is_given(batches: ArrayBatches) -> None:
    for [batch] in batches.batches(Epoch(np.random.default_rng(0))):
        out = np.empty(batch.shape("X"))
        batch.copy("X", out)
        np.testing.assert_array_equal(out, batch.array("X"))


def test_a_batch_size_beyond_the_rows_is_one_batch() -> None:
    batches = ArrayBatches({"X": np.zeros((3, 1))}, [1.0], 100)
    assert (batches.batch_size, batches.steps) == (3, 1)


def test_a_split_is_disjoint_complete_and_the_seed_s() -> None:
    numbers = np.arange(20.0)[:, None]
    columns = Columns(inputs={"X": numbers}, labels={"label": numbers})
    train, held = split(columns, 0.25, 0)
    assert (train.rows, held.rows) == (15, 5)
    assert sorted(np.concatenate([train.inputs["X"], held.inputs["X"]]).ravel()) == [*range(20)]
    np.testing.assert_array_equal(held.inputs["X"], held.labels["label"])
    again, other = split(columns, 0.25, 0)[1], split(columns, 0.25, 1)[1]
    np.testing.assert_array_equal(again.inputs["X"], held.inputs["X"])
    assert not np.array_equal(other.inputs["X"], held.inputs["X"])


@pytest.mark.parametrize("fraction", [0.0, 1.0, 1.5, -0.5, 0.01, 0.99])
def test_a_split_that_leaves_one_side_empty_is_refused(fraction: float) -> None:
    columns = Columns(inputs={"X": np.zeros((10, 1))})
    with pytest.raises(DataError, match=rf"rows for both training and validation; {fraction} of"):
        split(columns, fraction, 0)


def columns_of(x: Any, y: Any = None, weight: Any = None, **names: Any) -> Columns:
    names = {"inputs": ["X"], "labels": ["label"]} | names
    return as_columns(x, y, weight, **names)


@pytest.mark.parametrize(
    ("x", "y", "weight", "names", "text"),
    [
        (np.zeros((0, 2)), None, None, {}, "the data are empty: 0 rows"),
        (3.0, None, None, {}, "X is a single value, expected at least one row"),
        (np.zeros((3, 2)), np.zeros(2), None, {}, "X has 3, label has 2"),
        (np.zeros((3, 2)), np.zeros(3), np.ones(4), {}, "sample_weight has 4"),
        (np.zeros(3), None, None, {"inputs": ["a", "b"]}, r"2 inputs: pass a mapping \{'a': …"),
        ({"a": np.zeros(3)}, None, None, {"inputs": ["a", "b"]}, "X lacks the input 'b'; it has a"),
        ({"a": [0], "bb": [0]}, None, None, {"inputs": ["a", "b"]}, "X has 'bb', .* mean 'b'"),
        (np.zeros(3), np.zeros(3), None, {"labels": ["l", "m"]}, "y is one array, but there are 2"),
        (np.zeros(3), {"l": [0]}, None, {"labels": ["l", "m"]}, "y lacks the label 'm'"),
    ],
)
def test_unfit_data_are_refused(x: Any, y: Any, weight: Any, names: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        columns_of(x, y, weight, **names)


FLOAT = TensorSpec("X", 1, ("N", 2))
INTEGER = TensorSpec("ids", 7, ("N",))


def test_arrays_take_the_type_of_the_graph_and_are_copied_only_then() -> None:
    right = np.ones((3, 2), np.float32)
    assert fit_to(right, FLOAT, "X") is right
    assert fit_to(np.ones((3, 2), np.int8), FLOAT, "X").dtype == np.float32
    assert fit_to(np.asfortranarray(right), FLOAT, "X").flags.c_contiguous


@pytest.mark.parametrize(
    ("array", "spec", "text"),
    [
        (np.zeros((3, 4)), FLOAT, r"X has shape \[3, 4\], but 'X' expects \[N, 2\]"),
        (np.zeros(3), TensorSpec("X", 1, ("N", 1)), r"reshape it: X\.reshape\(-1, 1\)"),
        (np.zeros((3, 1)), TensorSpec("X", 1, ("N",)), r"reshape it: X\.ravel\(\)"),
        (np.zeros(2), FLOAT, r"single row, pass X\[None\]"),
        (np.array([["a", "b"]]), FLOAT, "X has type <U1, but 'X' expects float32"),
        (np.zeros((3, 2), complex), FLOAT, "X has type complex128"),
        (np.zeros(3), INTEGER, r"expects int64; convert it: X\.astype\('int64'\)"),
        (np.array([[0, 1], [np.nan, 0]]), FLOAT, "not finite .first in row 1.*check_finite=False"),
        (np.array([[0, 1e300]]), FLOAT, "has 1e.300 in row 0, but .* expects float32, in which"),
    ],
)
def test_arrays_that_fit_no_graph_are_refused(array: Any, spec: TensorSpec, text: str) -> None:
    with pytest.raises(DataError, match=text):
        fit_to(array, spec, "X")


def test_large_finite_values_are_not_taken_for_infinite() -> None:
    # Their float64 sum is finite here, in float32 it would not be.
    fit_to(np.full((3, 2), 3e38, np.float32), FLOAT, "X")
    fit_to(np.full((3, 2), 1.7e308), TensorSpec("X", 11, ("N", 2)), "X")


def test_groups_hold_the_rows_of_single_batches(batches: ArrayBatches) -> None:
    single = [batch for [batch] in batches.batches(Epoch(np.random.default_rng(3)))]
    groups = list(batches.batches(Epoch(np.random.default_rng(3), at_once=2)))
    assert [len(g) for g in groups] == [2, 2, 1]
    for one, other in zip(single, [b for group in groups for b in group], strict=True):
        np.testing.assert_array_equal(one.rows, other.rows)
        assert list(one.denominators) == list(other.denominators)
    block = groups[0]
    out = np.empty((10, 1))
    block.copy("X", out)
    np.testing.assert_array_equal(out, np.concatenate([b.array("X") for b in single[:2]]))


def test_an_input_and_a_label_of_one_name_are_both_counted() -> None:
    """The rows of a label are those of the inputs, whatever the columns are called."""
    with pytest.raises(DataError, match="a has 5, a has 3"):
        _ = Columns(inputs={"a": np.zeros(5)}, labels={"a": np.zeros(3)}).rows


# Batches that another author makes: as they are, mixed in a buffer, drawn ahead; to look at, too ---


def numbers(sizes: list[int], first: int = 0) -> list[Any]:
    """Batches of consecutive numbers."""
    ends = np.cumsum([first, *sizes])
    return [(np.arange(a, b, dtype=float)[:, None], None) for a, b in itertools.pairwise(ends)]


def open_(source: Any, *, limit: int | None = None, size: int = 4, **options: Any) -> Any:
    def convert(X: Any, y: Any, weight: Any) -> Columns:
        return Columns(inputs={"X": np.asarray(X)})

    made = IterableBatches(Batches(source, **options), convert, limit, size)
    made.use(Conversion(prepare=lambda c: dict(c.inputs), denominators=lambda c: [1.0]))
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
    for k in itertools.count(step=3):
        yield np.arange(k, k + 3, dtype=float)[:, None], None


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
    assert [epoch(source, k) for k in range(4)] == [[[0, 1], [2, 3]], [[4, 5]]] * 2
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
    with pytest.raises(DataError, match=r"^batch 1: the rows of 'X' have shape \[5\], those of"):
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
    of_x: tuple[Any, ...] = ((a for a, _ in held), ((a,) for a, _ in held))
    for source in (Batches(held), lambda: iter(held), *of_x):
        np.testing.assert_allclose(trainer.predict(source), predicted, rtol=1e-6)


def test_an_iterable_cannot_be_split() -> None:
    text = "an iterable cannot be split into training and validation rows; pass validation_data="
    with pytest.raises(DataError, match=text):
        make(models.linear()).fit(parts(*regression()), validation_data=0.2)


def test_several_steps_per_run_give_the_result_of_single_steps() -> None:
    x, y = regression(rows=96, features=6)
    states = []
    for steps in (1, 4):
        backend = {"name": "fused", "steps_per_run": steps}
        trainer = make(models.mlp(), epochs=2, batch_size=4, backend=backend)
        trainer.fit(Batches(parts(x, y), buffer=30))
        states.append(trainer.get_state())
    same(states[0], states[1], 1e-6)
