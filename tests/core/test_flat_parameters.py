"""Small parameters that move as one vector: when they do, and that nothing else changes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import attrs
import numpy as np
import pytest

from ortflex_core import Optimizer, Trace, build, hyper, internals_of, step_program
from ortflex_core.compiler.programs import flat_parameters
from ortflex_core.compiler.runtime import session
from tests import models
from tests.gradcheck import run
from tests.training import make, regression, same

X, Y = regression(rows=45, features=6)


def trained(**options: Any) -> Any:
    usual = {"optimizer": "adam", "epochs": 2, "batch_size": 10, "learning_rate": 0.01}
    trainer = make(models.mlp(), **{"backend": "fused", **usual, **options})
    trainer.fit(X, Y)
    return trainer


def layout(trainer: Any, scaled: bool = False) -> flat_parameters.Layout | None:
    return flat_parameters.layout(internals_of(trainer).problem, scaled)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.5},
        {"optimizer": "sgd", "clip_value": 0.1, "clip_norm": 0.5},
        {"averaging": {"name": "ema", "decay": 0.8}, "optimizer": "rmsprop"},
        {"penalty": {"name": "l2", "l2": 0.1}, "accumulate": 2},
        {"backend": {"name": "fused", "steps_per_run": 1}},
        {"backend": {"name": "fused", "steps_per_run": 1}, "averaging": "swa"},
    ],
)
def test_as_one_vector_or_one_by_one_the_numbers_are_the_same(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_one = trained(**options)
    monkeypatch.setattr(flat_parameters, "_COPIED", 0)
    monkeypatch.setattr(session, "_cache", OrderedDict())  # has the graphs of that structure
    one_by_one = trained(**options)
    same(as_one.get_state(averaged=True), one_by_one.get_state(averaged=True))
    same(as_one.engine.slots(), one_by_one.engine.slots())


def test_adam_takes_a_dozen_operators_for_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def roots() -> int:
        nodes = step_program(internals_of(trained()).problem, steps=3, rows=10).proto().graph.node
        return Counter(node.op_type for node in nodes)["Sqrt"]

    assert roots() == 3
    monkeypatch.setattr(flat_parameters, "_COPIED", 0)
    assert roots() == 3 * 6


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd"},  # its updates are part of the products that make the gradients
        {"optimizer": "lamb"},  # the norm of each parameter counts
        {"constraint": {"W1": "max_norm"}},
        {"groups": [{"params": "W1", "rate": 0.1}]},
        {"params": ["W1"]},
    ],
)
def test_what_is_not_elementwise_or_not_alike_moves_one_by_one(options: dict[str, Any]) -> None:
    trainer = trained(**options)
    assert layout(trainer, scaled=options == {"optimizer": "sgd"}) is None


def test_large_parameters_are_not_copied() -> None:
    def chosen(width: int) -> flat_parameters.Layout | None:
        model = models.mlp((6, width, 1))
        trainer = make(model, backend="fused", optimizer="adam", batch_size=10)
        trainer.fit(X, Y)
        return layout(trainer)

    small = chosen(8)
    assert small is not None
    assert dict(small.shapes) == {"W1": (6, 8), "b1": (8,), "W2": (8, 1), "b2": (1,)}
    assert chosen(8000) is None


def test_a_scalar_and_a_matrix_come_back_in_their_shapes() -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (2, 3), "b": (), "c": (4,), "d": (1, 1)}
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    trace, every = Trace({"": 17}), flat_parameters.Layout(shapes=shapes)
    inputs = {name: trace.input(name, np.float32, shape) for name, shape in shapes.items()}
    parts = every.split(trace, every.concat(trace, inputs) * 2)
    got = run(build(trace, {f"new/{n}": t for n, t in parts.items()}, name="p"), values)
    for name, value in values.items():
        np.testing.assert_array_equal(got[f"new/{name}"], 2 * value)


ODD_NAMES = [
    {"X": "a", "W1": "a@1", "b1": "gradient/W1", "W2": "label@1"},
    {"b1": "m/W1", "W1": "v/W1", "W2": "average/b1"},
    {"X": "new/W1", "W2": "new/m/W1", "Y": "gradient/W1"},
    {"X": "sample_weight", "Y": "total/0", "b1": "penalty", "W2": "loss0/scale"},
    {"X": "rate", "Y": "label", "W1": "a/b", "b1": "x@1", "W2": "step", "b2": "host/rate"},
]


@pytest.mark.parametrize("names", ODD_NAMES)
@pytest.mark.parametrize("steps", [1, 4])
def test_a_model_may_have_the_names_of_the_training(names: dict[str, str], steps: int) -> None:
    """No name of a model meets one of a slot, a gradient, a cost, a column or a new value."""
    states = []
    options: dict[str, Any] = {"optimizer": "adam", "penalty": "l2", "averaging": "swa"}
    options |= {"backend": {"name": "fused", "steps_per_run": steps}, "batch_size": 10}
    for model in (models.renamed(models.mlp(), names), models.mlp()):
        trainer = make(model, **options)
        trainer.fit(X, Y, sample_weight=np.linspace(0.5, 2, len(X), dtype=np.float32))
        states.append({**trainer.get_state(), "predicted": trainer.predict(X)})
    same(states[0], {names.get(n, n): a for n, a in states[1].items()})


@attrs.frozen(kw_only=True)
class MatricesDecay(Optimizer):
    """Momentum that leaves biases without decay."""

    name = "matrices_decay"
    default_rate = 0.02
    slots = ("velocity",)
    decay: float = hyper(default=0.1)

    def update(
        self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any
    ) -> tuple[Any, dict[str, Any]]:
        if weight.rank > 1:
            gradient = gradient + self.decay * weight
        velocity = 0.9 * slots["velocity"] + gradient
        return weight - rate * velocity, {"velocity": velocity}


@attrs.frozen(kw_only=True)
class MatricesCentered(Optimizer):
    """Plain descent along the gradient, whose mean a matrix leaves out."""

    name = "matrices_centered"
    default_rate = 0.02

    def update(
        self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any
    ) -> tuple[Any, dict[str, Any]]:
        if weight.rank > 1:
            gradient = gradient - op.ReduceMean(gradient, axes=[0], keepdims=1)
        return weight - rate * gradient, {}


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("first", ["W1", "b1"])
@pytest.mark.parametrize("optimizer", [MatricesDecay(), MatricesCentered()])
def test_a_formula_may_ask_for_a_shape(optimizer: Optimizer, first: str, steps: int) -> None:
    """Neither a vector of all weights nor the first parameter speaks for the others."""
    model = models.mlp()
    tensors = sorted(model.graph.initializer, key=lambda t: t.name[0] != first[0])
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors)
    options: dict[str, Any] = {"optimizer": optimizer, "batch_size": 10, "learning_rate": None}
    fused = make(model, epochs=2, backend={"name": "fused", "steps_per_run": steps}, **options)
    fused.fit(X, Y)
    plain = make(model, epochs=2, backend="example_numpy", **options)  # updates one by one
    plain.fit(X, Y)
    same(fused.get_state(), plain.get_state())


def test_what_says_that_it_is_not_elementwise_is_believed() -> None:
    class Modest(type(trained().optimizer)):  # type: ignore[misc]
        elementwise = False

    assert layout(trained()) is not None
    assert layout(trained(optimizer=Modest())) is None
