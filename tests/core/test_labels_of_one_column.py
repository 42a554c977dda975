"""Labels [N] for an output [N, 1]: the same training as with [N, 1], whatever way they come in.

The class: labels enter a Trainer by many ways (arrays, files, pieces, iterables, validation, scores), and
each has to take what the others take; nothing but the axis of size 1 that is missing is ever added.
"""

from __future__ import annotations

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
    """A loss of a user, which has a formula and nothing else."""

    @attrs.frozen(kw_only=True)
    class Robust(Loss):
        name: ClassVar[str] = "robust"

        def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
            error = predicted - expected
            return error * error / (error * error + 1)

    ends = []
    for y in (FLAT, Y):
        made = trainer(loss=Robust(), backend="fused")
        made.fit(X, y)
        ends.append(made.get_state())
    same(*ends, tolerance=0)


def test_only_the_axis_of_one_that_is_missing_is_added() -> None:
    """Neighboring mistakes: a broadcast to other sizes, to an unknown size, or of another rank."""
    for outputs, y in ((3, FLAT), (1, Y[:, None]), (1, FLAT[None, :]), (1, np.hstack([Y, Y]))):
        made = make(models.linear(outputs=outputs), epochs=1)
        with pytest.raises(DataError):
            made.fit(X, y)


def test_a_row_of_positions_with_one_output_each() -> None:
    """[N, T] for [N, T, 1]; but not [N] for it."""
    proto = models.model(
        [models.helper.make_node("MatMul", ["X", "w"], ["Y"])],
        [models.floats("X", "N", 4, 3)],
        [models.floats("Y", "N", 4, 1)],
        {"w": np.ones((3, 1))},
    )
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
