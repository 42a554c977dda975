"""Batches: which rows, in which order, with which denominators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import Columns, DataError, TensorSpec, fit_to, split
from ortflex_core.kernel.batches import ArrayBatches, Epoch
from ortflex_core.training.data.columns import as_columns

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
    columns = Columns(
        inputs={"X": np.arange(20.0)[:, None]}, labels={"label": np.arange(20.0)[:, None]}
    )
    train, held = split(columns, 0.25, 0)
    assert (train.rows, held.rows) == (15, 5)
    together = np.concatenate([train.inputs["X"], held.inputs["X"]]).ravel()
    assert sorted(together) == list(range(20))
    np.testing.assert_array_equal(held.inputs["X"], held.labels["label"])
    again, other = split(columns, 0.25, 0)[1], split(columns, 0.25, 1)[1]
    np.testing.assert_array_equal(again.inputs["X"], held.inputs["X"])
    assert not np.array_equal(other.inputs["X"], held.inputs["X"])


@pytest.mark.parametrize("fraction", [0.0, 1.0, 1.5, -0.5, 0.01, 0.99])
def test_a_split_that_leaves_one_side_empty_is_refused(fraction: float) -> None:
    columns = Columns(inputs={"X": np.zeros((10, 1))})
    with pytest.raises(
        DataError, match=rf"rows for both training and validation; {fraction} of 10 rows"
    ):
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
        (
            {"a": [0], "bb": [0]},
            None,
            None,
            {"inputs": ["a", "b"]},
            "X has 'bb', which is not an input of the model; did you mean 'b'",
        ),
        (np.zeros(3), np.zeros(3), None, {"labels": ["l", "m"]}, "y is one array, but there are 2"),
        (np.zeros(3), {"l": [0]}, None, {"labels": ["l", "m"]}, "y lacks the label 'm'"),
    ],
)
def test_data_that_do_not_fit_are_refused(
    x: Any, y: Any, weight: Any, names: Any, text: str
) -> None:
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
        (
            np.array([[0, 1e300]]),
            FLOAT,
            "has 1e.300 in row 0, but .* expects float32, in which this is infinite; scale",
        ),
    ],
)
def test_arrays_that_do_not_fit_the_graph_are_refused(
    array: Any, spec: TensorSpec, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        fit_to(array, spec, "X")


def test_large_finite_values_are_not_taken_for_infinite() -> None:
    # Their float64 sum is finite here, in float32 it would not be.
    fit_to(np.full((3, 2), 3e38, np.float32), FLOAT, "X")
    wide = TensorSpec("X", 11, ("N", 2))
    fit_to(np.full((3, 2), 1.7e308), wide, "X")


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
