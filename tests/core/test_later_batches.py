"""A later batch that does not fit: the error names the batch, the input or labels, and both shapes.

The sizes of these models are names, so that only a run of the graph shows what fits. Labels with one
value along such an axis would be broadcast, in silence, without the check before the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, DataError, Trainer
from tests import models
from tests.training import same

Rows = tuple[Any, Any]
ROWS = 6


def draw(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def network(body: str, inputs: str, outputs: str, **weights: Any) -> bytes:
    return bytes(models.parsed(body, weights, inputs, outputs).SerializeToString())


# Any number of columns, as the file says, but its weight needs 4.
DENSE = network("Y = MatMul(X, W)", "float[N, D] X", "float[N, 2] Y", W=np.ones((4, 2)))
# Two inputs of the same length.
PAIR = network(
    "AB = Mul(A, B)  Y = MatMul(AB, W)",
    "float[N, T, 4] A, float[N, T, 4] B",
    "float[N, T, 2] Y",
    W=np.ones((4, 2)),
)
# A convolution of images of any size.
IMAGE = network(
    "Y = Conv<pads = [1, 1, 1, 1]>(X, W)",
    "float[N, 1, H, V] X",
    "float[N, 1, H, V] Y",
    W=np.full((1, 1, 3, 3), 0.1),
)
# An embedding of 7 tokens: the values of the input may be wrong, too.
MEAN = "rows = Gather(E, ids)  Y = ReduceMean<axes = [1], keepdims = 0>(rows)"
TOKENS = network(MEAN, "int64[N, T] ids", "float[N, 2] Y", E=np.ones((7, 2)))
PRODUCT = network(
    MEAN.replace("Y", "mean") + "  Y = MatMul(mean, W)",
    "int64[N, T] ids",
    "float[N, 2] Y",
    E=np.ones((7, 3)),
    W=np.ones((3, 2)),
)


def both(a: int, b: int) -> dict[str, Any]:
    return {"A": draw(ROWS, a, 4), "B": draw(ROWS, b, 4)}


GOOD: dict[bytes, Rows] = {
    DENSE: (draw(ROWS, 4), draw(ROWS, 2)),
    PAIR: (both(3, 3), draw(ROWS, 3, 2)),
    IMAGE: (draw(ROWS, 1, 4, 4), draw(ROWS, 1, 4, 4)),
    TOKENS: (np.ones((ROWS, 3), np.int64), draw(ROWS, 2)),
}
INPUTS: dict[str, tuple[bytes, Rows, tuple[str, ...]]] = {
    "columns": (DENSE, (draw(ROWS, 5), draw(ROWS, 2)), ("X", "[6, 5]", "[N, D]", "[6, 4]")),
    "lengths of two inputs": (
        PAIR,
        (both(3, 5), draw(ROWS, 3, 2)),
        ("B", "[6, 5, 4]", "[N, T, 4]", "[6, 3, 4]"),
    ),
    "values": (
        TOKENS,
        (np.full((ROWS, 3), 7), draw(ROWS, 2)),
        ("ids", "[6, 3]", "Gather", "idx=7"),
    ),
}
LABELS: dict[str, tuple[bytes, Rows, tuple[str, ...]]] = {
    "longer labels": (PAIR, (both(3, 3), draw(ROWS, 4, 2)), ("'label'", "[6, 3, 2]", "[6, 4, 2]")),
    "one label for all places": (
        IMAGE,
        (draw(ROWS, 1, 4, 4), draw(ROWS, 1, 1, 1)),
        ("'label'", "[6, 1, 4, 4]", "[6, 1, 1, 1]"),
    ),
    "one label for a longer row": (
        PAIR,
        (both(5, 5), draw(ROWS, 1, 2)),
        ("'label'", "[6, 5, 2]", "[6, 1, 2]"),
    ),
}
CASES = {**INPUTS, **LABELS}
Call = Callable[[Trainer, list[Rows]], Any]
OF_BATCHES: dict[str, Call] = {
    "fit": lambda t, batches: t.fit(batches),
    "fit, drawn ahead": lambda t, batches: t.fit(Batches(batches)),
    "find_rate": lambda t, batches: t.find_rate(batches, steps=5),
    "evaluate": lambda t, batches: t.evaluate(batches),
    "validation": lambda t, batches: t.fit(*batches[0], validation_data=list(batches)),
}


def made(model: bytes, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {"epochs": 1, "progress": False, "receipt": False}
    return Trainer(model, loss="squared_error", **settings | arguments)


def caught(call: Callable[[], Any], words: tuple[str, ...]) -> str:
    with pytest.raises(DataError) as error:
        call()
    text = str(error.value)
    assert [w for w in words if w not in text] == [], text
    return text


@pytest.mark.parametrize("how", OF_BATCHES)
@pytest.mark.parametrize("case", CASES)
def test_a_batch_of_an_iterable_has_its_number_and_both_shapes(case: str, how: str) -> None:
    model, bad, words = CASES[case]
    text = caught(lambda: OF_BATCHES[how](made(model), [GOOD[model], GOOD[model], bad]), words)
    assert "batch 2: " in text


@pytest.mark.parametrize("case", INPUTS)
def test_a_batch_of_a_prediction_has_its_number(case: str) -> None:
    model, bad, words = INPUTS[case]
    rows = [GOOD[model][0], GOOD[model][0], bad[0]]
    assert "batch 2: " in caught(lambda: made(model).predict(iter(rows)), words)


@pytest.mark.parametrize("case", CASES)
def test_a_later_step_and_later_arrays(case: str) -> None:
    """They have no number, and a Trainer that saw them goes on with the same weights."""
    model, bad, words = CASES[case]
    trainer = made(model)
    trainer.step(GOOD[model])
    before = trainer.get_state()
    words = tuple(w for w in words if w not in ("[6, 4]", "[6, 3, 4]"))  # those of the first batch
    calls = [lambda: trainer.step(bad), lambda: trainer.evaluate(*bad), lambda: trainer.fit(*bad)]
    for call in [*calls, lambda: trainer.per_sample_losses(*bad)]:
        assert "batch " not in caught(call, words).replace("this batch", "")
    same(trainer.get_state(), before, 0)
    trainer.step(GOOD[model])


@pytest.mark.parametrize("arguments", [{"accumulate": 2}, {"freeze": "E"}], ids=str)
def test_the_batch_that_fails_is_named_among_those_of_a_step(arguments: dict[str, Any]) -> None:
    """Of two batches in a step, and of a batch of which a column is derived before the step."""

    good = GOOD[TOKENS]
    bad = np.full((ROWS, 3), 7), good[1]
    words = ("batch 3: ", "ids [6, 3]", "idx=7")
    caught(lambda: made(PRODUCT, **arguments).fit([good, good, good, bad]), words)


def test_one_row_of_many_in_arrays() -> None:
    """The batch of the row fails, not the first one."""
    ids = np.ones((50, 3), np.int64)
    ids[44, 1] = 9
    trainer = made(TOKENS, batch_size=5, shuffle=False)
    caught(lambda: trainer.fit(ids, draw(50, 2)), ("ids [5, 3]", "Gather", "idx=9"))


def test_predictions_of_different_lengths_do_not_fit_into_one_array() -> None:
    text = caught(
        lambda: made(IMAGE).predict(iter([draw(2, 1, 4, 4), draw(2, 1, 5, 5)])),
        ("'Y'", "[1, 5, 5]", "[1, 4, 4]"),
    )
    assert "batch 1" in text


@pytest.mark.parametrize("how", ["fit", "evaluate"])
def test_what_is_converted_before_the_graph_has_the_number_too(how: str) -> None:
    """Lengths, names and kinds of labels; sources that tests of data have are elsewhere."""
    X, y = GOOD[DENSE]
    for bad in [(X, y[:3]), ({"x": X}, y), (X, y.astype(str)), (None, y)]:
        text = caught(lambda bad=bad: getattr(made(DENSE), how)([(X, y), bad]), ())  # type: ignore[misc]
        assert text.startswith("batch 1: ")
