"""State of optimizers that has shapes of its own: what keeps it, loads it and refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import (
    BrokenPlugin,
    CheckpointError,
    DataError,
    Optimizer,
    Unsupported,
    compare,
    hyper,
    internals_of,
)
from ortflex_core.compiler.programs import flat_parameters
from ortflex_core.training.artifacts import checkpoint
from tests import models
from tests.core.planted import but
from tests.training import every_backend, make, regression

X, Y = regression(rows=24, features=6)


@attrs.frozen(kw_only=True)
class Rows(Optimizer):
    """``row ← row + mean of g²`` over the last axis, ``w ← w − rate·g / (√row + 1)``."""

    name: ClassVar[str] = "rows"
    slots: ClassVar[tuple[str, ...]] = ("row",)
    elementwise: ClassVar[bool] = False
    scale: float = hyper(default=1.0)

    def slot_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return {"row": (*shape[:-1], 1)}

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        row = slots["row"] + op.ReduceMean(gradient * gradient, axes=[-1], keepdims=1)
        return weight - rate * self.scale * gradient / (op.Sqrt(row) + 1.0), {"row": row}


def full_row(self: Any, op: Any, weight: Any, gradient: Any, rate: Any, _: Any, slots: Any) -> Any:
    return weight - rate * gradient, {"row": slots["row"] + gradient * gradient}


@attrs.frozen(kw_only=True)
class Longest(Optimizer):
    """``long ← max(long, ‖g‖)`` over all weights, ``w ← w − rate·g / (long + 1)``."""

    name: ClassVar[str] = "longest"
    shared: ClassVar[tuple[str, ...]] = ("long",)
    elementwise: ClassVar[bool] = False

    def update_shared(
        self, op: Any, weights: Any, gradients: Any, rate: Any, step: Any, slots: Any, shared: Any
    ) -> Any:
        squares = op.Sum(*(op.ReduceSumSquare(g, keepdims=0) for g in gradients))
        return {"long": op.Max(shared["long"], op.Sqrt(squares))}

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        return weight - rate * gradient / (slots["long"] + 1.0), {}


def shared_back(self: Any, op: Any, weight: Any, gradient: Any, *rest: Any) -> Any:
    return weight - gradient, {"long": rest[-1]["long"]}


def trained(optimizer: Any, backend: str = "fused", **options: Any) -> Any:
    usual = {"epochs": 2, "batch_size": 8, "learning_rate": 0.05, "shuffle": False}
    trainer = make(models.mlp(), optimizer=optimizer, backend=backend, **{**usual, **options})
    trainer.fit(X, Y)
    return trainer


@every_backend
def test_slots_have_the_shapes_that_the_optimizer_says(backend: str) -> None:
    if backend == "training_session":
        refused_by_session("adafactor")
        return
    slots = trained("adafactor", backend, averaging="ema").engine.slots()
    shapes = {name: slot.shape for name, slot in slots.items()}
    assert shapes["row/W1"] == (6, 1)
    assert shapes["column/W1"] == (1, 8)
    assert shapes["variance/b1"] == (8,)
    assert shapes["average/W1"] == (6, 8)
    assert not {"row/b1", "column/b1", "variance/W1"} & set(shapes)


def refused_by_session(optimizer: Any) -> None:
    with pytest.raises(Unsupported, match="TrainingSession has the optimizers sgd, adam and lamb"):
        trained(optimizer, "training_session")


def test_the_state_of_a_matrix_is_its_rows_and_columns() -> None:
    model = models.mlp((6, 256, 256, 1))
    sizes = {}
    for optimizer in ("adam", "adafactor"):
        problem = internals_of(make(model, optimizer=optimizer)).problem
        sizes[optimizer] = sum(a.size for a in problem.slot_values().values())
    weights = sum(a.size for a in models.weights_of(model).values())
    assert sizes["adam"] == 2 * weights
    assert sizes["adafactor"] < weights / 40


@every_backend
def test_what_parameters_share_is_one_number(backend: str) -> None:
    if backend == "training_session":
        refused_by_session(Longest())
        return
    steps: list[float] = []
    trainer = make(models.mlp(), optimizer=Longest(), backend=backend, learning_rate=1e-30)
    for rows in (slice(0, 8), slice(8, 16), slice(16, 24)):
        other = make(models.mlp(), optimizer="sgd", backend=backend, learning_rate=1.0)
        before = other.get_state()
        other.step((X[rows], Y[rows]))
        moves = [before[n] - array for n, array in other.get_state().items()]
        steps.append(float(np.sqrt(sum(np.square(move).sum() for move in moves))))
        trainer.step((X[rows], Y[rows]))
        np.testing.assert_allclose(trainer.engine.slots()["long"], max(steps), rtol=1e-5)
    assert {"long", "step"} == set(trainer.engine.slots())


@pytest.mark.parametrize("optimizer", [{"name": "prodigy", "d0": 0.01}, "adafactor"])
def test_every_backend_keeps_the_state_of_the_float64_reference(optimizer: Any) -> None:
    groups = [{"params": "W1", "rate": 0.5}]
    trainer = make(models.mlp(), optimizer=optimizer, backend="fused", groups=groups, batch_size=8)
    compared = compare(trainer, X, Y, steps=6)
    assert not compared.differences
    for result in compared.results:
        kept = result.kept_errors
        assert {"d", "r", "d#group0"} <= set(kept) or {"row/W1", "variance/b1"} <= set(kept)
        assert max(kept.values()) < 1e-5


@pytest.mark.parametrize("optimizer", [Rows(), but(Rows(), elementwise=True), Longest()])
def test_parameters_do_not_move_as_one_vector_where_slots_have_other_shapes(optimizer: Any) -> None:
    trainer = trained(optimizer)
    assert flat_parameters.layout(internals_of(trainer).problem, scaled=False) is None
    by_hand = models.weights_of(models.mlp())
    assert any((trainer.get_state()[n] != a).any() for n, a in by_hand.items())


@pytest.mark.parametrize(
    ("right", "name", "wrong", "text"),
    [
        (Rows, "update", full_row, r"a tensor of shape \[.*8\] .*, expected .*; the slot 'row'"),
        (Rows, "slot_shapes", lambda _, shape: {"column": shape}, "where the slots are row"),
        (Rows, "slot_shapes", lambda *_: {"row": "3"}, "expected a tuple of sizes .*'3'"),
        (Rows, "slot_shapes", lambda _, shape: {"row": (shape[5],)}, "IndexError"),
        (
            Longest,
            "update_shared",
            lambda _, op, weights, gradients, *rest: {"long": op.Reshape(gradients[0], [-1])},
            r"a tensor of shape \[.*\] .*, expec",
        ),
        (Longest, "update_shared", lambda *_: {}, "where the names are long"),
        (Longest, "shared", ("step",), r"\('step'\)"),
        (Longest, "slots", ("long",), r"shared \('long'\)"),
        (Longest, "update", shared_back, "the slots given are long"),
        (Longest, "update_shared", Optimizer.update_shared, "has shared state but no "),
    ],
)
def test_slots_of_a_wrong_shape_are_an_error_that_names_the_plugin(
    right: Any, name: str, wrong: Any, text: str
) -> None:
    with pytest.raises(BrokenPlugin, match=text) as error:
        trained(but(right(), **{name: wrong}))
    assert right.__name__ in str(error.value)
    assert name in str(error.value) or name == "slots"


def test_another_optimizer_does_not_take_the_slots(tmp_path: Path) -> None:
    trainer = trained("adafactor")
    trainer.save(tmp_path / "saved")
    other = make(models.mlp(), optimizer="adam", backend="fused", epochs=2, batch_size=8)
    with pytest.raises(CheckpointError, match="with other arguments: optimizer"):
        other.restore(tmp_path / "saved")
    for read in (
        lambda: other.restore(tmp_path / "saved", strict=False),
        lambda: type(trainer).resume(tmp_path / "saved", optimizer="adam"),
    ):
        with pytest.raises(CheckpointError, match="was written with another optimizer"):
            read()


def test_slots_of_another_shape_are_refused(tmp_path: Path) -> None:
    trainer = trained("adafactor")
    with pytest.raises(DataError, match=r"slot 'row/W1' has shape \[6, 1\], got \[6, 8\]"):
        trainer.engine.load_slots({"row/W1": np.zeros((6, 8), np.float32)})
    trainer.save(tmp_path / "saved")
    found = checkpoint.read(tmp_path / "saved")
    slots = dict(found.part("slot"))
    assert slots["row/W1"].shape == (6, 1)
    internals_of(trainer).live.forget()
    internals_of(trainer).live.standing.slots = {**slots, "row/W1": np.zeros((8, 1), np.float32)}
    trainer.save(tmp_path / "wrong")
    with pytest.raises(CheckpointError, match=r"is broken: the optimizer slot 'row/W1' has shape"):
        trainer.restore(tmp_path / "wrong")


@pytest.mark.parametrize("eps1", [2.0**-23, 1e-30])
def test_adafactor_of_gradients_of_zero_stays_finite(eps1: float) -> None:
    """Class: a bound that is given in float64 and whose square float32 cannot hold."""
    optimizer = {"name": "adafactor", "eps1": eps1}
    trainer = make(models.linear(), backend="fused", optimizer=optimizer, epochs=3)
    before = trainer.get_state()["coef"]
    trainer.fit(np.zeros((12, 5), np.float32), np.zeros((12, 1), np.float32))
    np.testing.assert_array_equal(trainer.get_state()["coef"], before)
