"""Labels [N] for an output [N, 1], and a later batch that does not fit.

Labels enter a Trainer by many ways (arrays, files, pieces, iterables, validation, scores), and each has to
take what the others take; nothing but the axis of size 1 that is missing is ever added. Of a batch that
does not fit, the error names the batch, the input or labels, and both shapes. The sizes of some models
are names, so that only a run of the graph shows what fits: labels with one value along such an axis would
be broadcast, in silence, without the check before the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Array, Batches, DataError, Loss, Trainer, compare, internals_of
from tests import models
from tests.training import every_backend, make, plugins, regression, same, usable

X, Y = regression(rows=24)
FLAT = Y.ravel()


def trainer(**options: Any) -> Trainer:
    settings = {"epochs": 2, "batch_size": 5, "learning_rate": 0.1, "metrics": ["r2"]} | options
    return make(models.linear(), **settings)


@every_backend
def test_every_backend_trains_and_scores_the_same(backend: str) -> None:
    weights = np.linspace(0.5, 2, 24)
    one, other = trainer(backend=backend), trainer(backend=backend)
    one.fit(X, FLAT, weights, validation_data=(X[:9], FLAT[:9]))
    other.fit(X, Y, weights, validation_data=(X[:9], Y[:9]))
    same(one.get_state(), other.get_state(), tolerance=0)
    assert one.validation_losses_ == other.validation_losses_
    assert internals_of(one).problem.terms[0].label.shape == ("batch", 1)
    assert one.evaluate(X, FLAT, weights) == one.evaluate(X, Y, weights)
    np.testing.assert_array_equal(one.per_sample_losses(X, FLAT), other.per_sample_losses(X, Y))
    assert one.step((X, FLAT)) == other.step((X, Y))


def batches(y: Array) -> Any:
    return lambda: ((X[k : k + 5], y[k : k + 5]) for k in range(0, 20, 5))


def source(folder: Path, name: str, y: Array) -> Any:
    """A data source, small enough for memory or read in pieces."""
    path = folder / f"{name}-{y.ndim}"
    if name == "npz":
        np.savez(path.with_suffix(".npz"), X=X, y=y)
        return plugins().component("data", {"name": "npz", "path": f"{path}.npz"})
    if name == "csv":
        table = np.column_stack([X, y.ravel()])
        head = ",".join([*(f"x{k}" for k in range(5)), "y"])
        np.savetxt(f"{path}.csv", table, delimiter=",", header=head, comments="", fmt="%.9g")
        spec = {"name": "csv", "path": f"{path}.csv", "target": "y"}
        return plugins().component("data", spec)
    for k in range(3):
        (path / f"{k}").mkdir(parents=True)
        np.save(path / f"{k}" / "X.npy", X[8 * k : 8 * k + 8])
        np.save(path / f"{k}" / "y.npy", y[8 * k : 8 * k + 8])
    return plugins().component("data", {"name": "npy", "path": str(path), "buffer": 7})


@pytest.mark.parametrize(
    "way", ["validation", "npz", "csv", "pieces", "iterable", "step", "float64"]
)
def test_every_kind_of_data_may_have_labels_of_one_column(way: str, tmp_path: Path) -> None:
    ends = []
    for y in (FLAT, Y):
        made = trainer(backend="fused")
        if way == "validation":
            made.fit(X, y, validation_data=0.25)
        elif way == "iterable":
            made.fit(batches(y))
        elif way == "step":
            for batch in batches(y)():
                made.step(batch)
        elif way == "float64":
            made.fit(X, y.astype(np.float64).tolist())
        else:
            data = source(tmp_path, way, y)
            made.fit(data)
            made.evaluate(data)
        ends.append(made.get_state())
    same(*ends, tolerance=0)


def test_backends_are_compared_with_them() -> None:
    found = compare(trainer(), X, FLAT, steps=3)
    assert found.reference_losses == compare(trainer(), X, Y, steps=3).reference_losses


def test_two_classes_by_number_or_name() -> None:
    kinds = (FLAT > 0).astype(np.int64)
    names = np.array(["no", "yes"])[kinds]
    ends = []
    for y, classes in ((kinds, None), (kinds[:, None], None), (names, ["no", "yes"])):
        made = trainer(loss="log_loss", metrics=["accuracy"], classes=classes, backend="fused")
        made.fit(X, y, validation_data=(X, y))
        ends.append(made.get_state())
        same(ends[0], ends[-1], tolerance=0)


def test_a_loss_that_declares_its_labels_and_refuses_none() -> None:
    class Robust(Loss):
        name = "robust"

        def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
            error = predicted - expected
            return error * error / (error * error + 1)

    flat, column = (trainer(loss=Robust(), backend="fused") for _ in range(2))
    flat.fit(X, FLAT)
    column.fit(X, Y)
    same(flat.get_state(), column.get_state(), tolerance=0)


def test_only_the_axis_of_one_that_is_missing_is_added() -> None:
    """Neighboring mistakes: a broadcast to other sizes, to an unknown size, or of another rank."""
    for outputs, y in ((3, FLAT), (1, Y[:, None]), (1, FLAT[None, :]), (1, np.hstack([Y, Y]))):
        made = make(models.linear(outputs=outputs), epochs=1)
        with pytest.raises(DataError):
            made.fit(X, y)


def test_a_row_of_positions_with_one_output_each() -> None:
    """[N, T] for [N, T, 1]; but not [N] for it."""
    weights, ends_of = {"w": np.ones((3, 1))}, ("float[N, 4, 3] X", "float[N, 4, 1] Y")
    proto = models.parsed("Y = MatMul(X, w)", weights, *ends_of)
    x = draw(8, 4, 3)
    y = x.sum(2)
    ends = []
    for labels in (y, y[..., None]):
        made = make(proto, epochs=2, backend="fused", learning_rate=0.1)
        made.fit(x, labels)
        ends.append(made.get_state())
    same(*ends, tolerance=0)
    with pytest.raises(DataError):
        make(proto, epochs=1).fit(x, y[:, 0])


# The class: a call that reads labels, where numpy's rules would make equal shapes of different ones.

CALLS: dict[str, Callable[[Trainer, Any, Any], Any]] = {
    "step": lambda trainer, x, y: trainer.step((x, y)),
    "fit": lambda trainer, x, y: trainer.fit(x, y),
    "batches": lambda trainer, x, y: trainer.fit([(x, y)]),
    "validation": lambda trainer, x, y: trainer.fit(
        x, (x["X"] if isinstance(x, dict) else x)[..., :1], validation_data=(x, y)
    ),
    "evaluate": lambda trainer, x, y: trainer.evaluate(x, y),
    "per_sample_losses": lambda trainer, x, y: trainer.per_sample_losses(x, y),
}


def product(inputs: int) -> bytes:
    """A product for each of any number of positions.

    The sum of two inputs has an axis whose name no input has: its size is known after a run only.
    """
    body, values = "Y = MatMul(X, W)", "float[N, T, 3] X"
    if inputs == 2:
        body, values = "H = Add(X, Z)  Y = MatMul(H, W)", f"{values}, float[N, S, 3] Z"
    return network(body, values, "float[N, M, 1] Y", W=np.ones((3, 1)))


def rows(inputs: int, positions: int, labels: int) -> Rows:
    x = draw(ROWS, positions, 3)
    return {"X": x, "Z": 0 * x} if inputs == 2 else x, np.full((ROWS, labels, 1), 0.5, np.float32)


@pytest.mark.parametrize("backend", ["fused", "xla"])
@pytest.mark.parametrize("loss", ["squared_error", "softmax_cross_entropy", "kullback_leibler"])
@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("positions", "labels"), [(1, 4), (4, 1)])
def test_one_value_is_not_repeated(
    positions: int, labels: int, call: str, inputs: int, loss: str, backend: str
) -> None:
    trainer = made(product(inputs), loss=loss, backend=usable(backend))
    with pytest.raises(DataError) as error:
        CALLS[call](trainer, *rows(inputs, positions, labels))
    if loss == "squared_error":
        assert f"[{ROWS}, {labels}, 1]" in str(error.value)
        assert f"[{ROWS}, {positions}, 1]" in str(error.value)


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("positions", [1, 4])
def test_equal_shapes_are_compared_once(inputs: int, positions: int) -> None:
    """The name of an input's axis says the size; without one the model is run, once for each shape."""
    trainer = made(product(inputs), backend="fused")
    x, y = rows(inputs, positions, positions)
    for _ in range(3):
        trainer.step((x, y))
    trainer.fit(x, y, validation_data=(x, y))
    trainer.fit([(x, y), (x, y)])
    assert len(trainer._internals.live.fitting) == inputs - 1
    expected = np.square((x if inputs == 1 else x["X"]) @ trainer.get_state()["W"] - y)
    values = trainer.per_sample_losses(x, y)
    np.testing.assert_allclose(values.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


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
    settings = {"loss": "squared_error", "epochs": 1, "progress": False, "receipt": False}
    return Trainer(model, **settings | arguments)


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
    for how in ("step", "evaluate", "fit", "per_sample_losses"):
        text = caught(lambda how=how: CALLS[how](trainer, *bad), words)  # type: ignore[misc]
        assert "batch " not in text.replace("this batch", "")
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
