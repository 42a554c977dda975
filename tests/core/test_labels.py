"""Labels [N] for an output [N, 1]: the same training as with [N, 1], whatever way they come in.

The class: labels enter a Trainer by many ways (arrays, files, pieces, iterables, validation, scores), and
each has to take what the others take; nothing but the axis of size 1 that is missing is ever added.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Array, DataError, Loss, Trainer, compare, internals_of
from tests import models
from tests.training import every_backend, make, plugins, regression, same

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
    path.mkdir()
    for k in range(3):
        shard = path / f"{k}"
        shard.mkdir()
        np.save(shard / "X.npy", X[8 * k : 8 * k + 8])
        np.save(shard / "y.npy", y[8 * k : 8 * k + 8])
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
            for k in range(0, 20, 5):
                made.step((X[k : k + 5], y[k : k + 5]))
        elif way == "float64":
            made.fit(X, y.astype(np.float64).tolist())
        elif way == "csv":
            made.fit(source(tmp_path, way, y))
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
    same(ends[0], ends[1], tolerance=0)
    same(ends[0], ends[2], tolerance=0)


def test_a_loss_that_declares_its_labels_and_refuses_none() -> None:
    @attrs.frozen(kw_only=True)
    class Robust(Loss):
        name: ClassVar[str] = "robust"

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
    x = np.random.default_rng(0).standard_normal((8, 4, 3)).astype(np.float32)
    y = x.sum(2)
    ends = []
    for labels in (y, y[..., None]):
        made = make(proto, epochs=2, backend="fused", learning_rate=0.1)
        made.fit(x, labels)
        ends.append(made.get_state())
    same(*ends, tolerance=0)
    with pytest.raises(DataError):
        make(proto, epochs=1).fit(x, y[:, 0])


# Labels and a tensor of which one has a single value along an axis of unknown size: never broadcast.
# The class: a call that reads labels, where numpy's rules would make equal shapes of different ones.

ROWS = 8
CALLS: dict[str, Callable[[Trainer, Any, Any], Any]] = {
    "step": lambda trainer, x, y: trainer.step((x, y)),
    "fit": lambda trainer, x, y: trainer.fit(x, y),
    "batches": lambda trainer, x, y: trainer.fit([(x, y)]),
    "validation": lambda trainer, x, y: (
        trainer.fit(x, x[..., :1], validation_data=(x, y))
        if isinstance(x, np.ndarray)
        else trainer.fit(x, x["X"][..., :1], validation_data=(x, y))
    ),
    "evaluate": lambda trainer, x, y: trainer.evaluate(x, y),
    "per_sample_losses": lambda trainer, x, y: trainer.per_sample_losses(x, y),
}


def network(inputs: int) -> bytes:
    """A product for each of any number of positions.

    The sum of two inputs has an axis whose name no input has: its size is known after a run only.
    """
    body, values = "Y = MatMul(X, W)", "float[N, T, 3] X"
    if inputs == 2:
        body, values = "H = Add(X, Z)  Y = MatMul(H, W)", f"{values}, float[N, S, 3] Z"
    made = models.parsed(body, {"W": np.ones((3, 1))}, values, "float[N, M, 1] Y")
    return bytes(made.SerializeToString())


def rows(inputs: int, positions: int, labels: int) -> tuple[Any, Any]:
    x = np.random.default_rng(positions).standard_normal((ROWS, positions, 3)).astype(np.float32)
    return {"X": x, "Z": 0 * x} if inputs == 2 else x, np.full((ROWS, labels, 1), 0.5, np.float32)


def made(inputs: int, loss: str, backend: str = "fused") -> Trainer:
    if backend == "xla":
        pytest.importorskip("jax")
    return Trainer(
        network(inputs), loss=loss, backend=backend, epochs=1, batch_size=ROWS, progress=False
    )


@pytest.mark.parametrize("backend", ["fused", "xla"])
@pytest.mark.parametrize("loss", ["squared_error", "softmax_cross_entropy", "kullback_leibler"])
@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("positions", "labels"), [(1, 4), (4, 1)])
def test_one_value_is_not_repeated(
    positions: int, labels: int, call: str, inputs: int, loss: str, backend: str
) -> None:
    trainer = made(inputs, loss, backend)
    with pytest.raises(DataError) as error:
        CALLS[call](trainer, *rows(inputs, positions, labels))
    if loss == "squared_error":
        assert f"[{ROWS}, {labels}, 1]" in str(error.value)
        assert f"[{ROWS}, {positions}, 1]" in str(error.value)


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("positions", [1, 4])
def test_equal_shapes_are_compared_once(inputs: int, positions: int) -> None:
    """The name of an input's axis says the size; without one the model is run, once for each shape."""
    trainer = made(inputs, "squared_error")
    x, y = rows(inputs, positions, positions)
    for _ in range(3):
        trainer.step((x, y))
    trainer.fit(x, y, validation_data=(x, y))
    trainer.fit([(x, y), (x, y)])
    assert len(trainer._internals.live.fitting) == inputs - 1
    expected = np.square((x if inputs == 1 else x["X"]) @ trainer.get_state()["W"] - y)
    values = trainer.per_sample_losses(x, y)
    np.testing.assert_allclose(values.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
