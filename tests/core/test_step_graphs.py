"""Graphs of steps: which problems share them, and small parameters that move in them as one vector."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortflex_core import (
    Loss,
    Optimizer,
    Trace,
    build,
    hyper,
    internals_of,
    problem_key,
    step_program,
)
from ortflex_core.compiler.programs import flat_parameters
from ortflex_core.compiler.runtime import session
from ortflex_core.training import fingerprint
from ortflex_plugins.backends import fused
from tests import models
from tests.gradcheck import run
from tests.training import every_backend, make, regression, same


def key(model: Any = None, **options: Any) -> Any:
    trainer = make(model or models.mlp(), backend="fused", **options)
    trainer.step(regression(rows=8, features=6))
    return problem_key(internals_of(trainer).problem)


def changed(**values: Any) -> onnx.ModelProto:
    model = models.mlp()
    for tensor in model.graph.initializer:
        if tensor.name in values:
            array = np.full(list(tensor.dims), values[tensor.name], np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.3},
        {"batch_size": 4, "epochs": 7, "schedule": "invscaling"},
        {"model": changed(W1=0.5)},  # other weights to start from
        {"optimizer": {"name": "sgd"}},
    ],
)
def test_rates_and_weights_are_no_part_of_a_graph(options: dict[str, Any]) -> None:
    assert key(**options) == key()


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "huber"},
        {"optimizer": "momentum"},
        {"penalty": "l2"},
        {"penalty": {"W1": "l2"}},
        {"params": "W*"},
        {"clip_norm": 1.0},
        {"transforms": "centralize"},
        {"adapters": "lora"},
        {"transforms": ["noise"], "seed": 1},
        {"averaging": "ema"},
        {"constraint": "non_negative"},
        {"reduction": "sum"},
        {"groups": [{"params": "W1", "rate": 0.5}]},
        {"model": models.mlp(activation="Relu")},
    ],
)
def test_what_changes_the_graph_changes_the_key(options: dict[str, Any]) -> None:
    assert key(**options) != key()


def test_equal_groups_at_other_positions_have_separate_symbols() -> None:
    x, y = regression(rows=8, features=6)
    frozen = [{"params": "W1", "frozen": True}, {"params": "b*", "rate": 0.5}]
    options: dict[str, Any] = {"backend": "fused", "optimizer": "adam"}
    second = make(models.mlp(), groups=frozen, **options)
    first = make(models.mlp(), params=["*", "!W1"], groups=frozen[1:], **options)
    costs = [[trainer.step((x, y)) for _ in range(2)] for trainer in (second, first)]
    assert costs[0] == costs[1]


def test_a_frozen_constant_is_part_of_the_graph() -> None:
    assert key(params="!W1", model=changed(W1=0.5)) != key(params="!W1")
    assert key(penalty={"name": "l2", "l2": 0.1}) == key(penalty={"name": "l2", "l2": 0.2})


def test_a_redefined_class_is_a_different_class() -> None:
    def loss(sign: float) -> Loss:
        class Mine(Loss):
            name = "mine"

            def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
                return sign * op.Abs(predicted - expected)

        return Mine()

    x, y = regression(rows=8, features=6)
    up, down = (make(models.mlp(), backend="fused", loss=loss(s)).step((x, y)) for s in (1, -1))
    assert up == -down != 0


@attrs.frozen(kw_only=True)
class _Blend(Loss):
    """A loss that reads labels for some values of a hyperparameter, as distillation does."""

    name: ClassVar[str] = "blend"
    own: float = hyper(default=1.0)

    @property
    def needs_labels(self) -> bool:
        return self.own < 1

    def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
        size = self.own * op.Abs(predicted)
        return size if expected is None else size + (1 - self.own) * op.Abs(predicted - expected)


@every_backend
@pytest.mark.parametrize("values", [(1.0, 0.25), (0.25, 1.0)])
def test_a_value_that_decides_whether_labels_are_read_changes_the_graph(
    backend: str, values: tuple[float, float]
) -> None:
    x, y = regression(rows=8, features=6)
    for own in values:
        trainer = make(models.mlp(), backend=backend, loss=_Blend(own=own))
        predicted = trainer.predict(x).astype(np.float64)
        wanted = np.mean(own * np.abs(predicted) + (1 - own) * np.abs(predicted - y))
        np.testing.assert_allclose(trainer.step((x, y)), wanted, rtol=1e-5)


@every_backend
@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)])
def test_a_groups_optimizer_has_its_own_parameters(backend: str, order: tuple[int, ...]) -> None:
    """Also after a training with a group that differs in nothing, and before it; torch is the oracle."""
    if backend == "training_session":
        pytest.skip("it has no groups")
    torch = pytest.importorskip("torch")
    plain = {"params": "W*", "rate": 1.0}
    own = {"params": "W*", "optimizer": {"name": "adam", "beta1": 0.0}}
    x, y = regression(rows=8, features=6)
    options: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.05, "batch_size": 8}
    for which in order:
        groups, beta = (([plain], 0.9), ([own], 0.0))[which]
        options |= {"epochs": 4, "shuffle": False, "groups": groups}
        trainer = make(models.mlp(), backend=backend, **options)
        start = {n: torch.tensor(a, requires_grad=True) for n, a in trainer.get_state().items()}
        table = [
            {"params": [start[n] for n in start if n[0] == kind], "betas": (first, 0.999)}
            for kind, first in (("W", beta), ("b", 0.9))
        ]
        optimizer = torch.optim.Adam(table, lr=0.05)
        for _ in range(4):
            optimizer.zero_grad()
            h = torch.tensor(x)
            for k in (1, 2, 3):
                h = h @ start[f"W{k}"] + start[f"b{k}"]
                h = torch.tanh(h) if k < 3 else h
            ((h - torch.tensor(y)) ** 2).mean().backward()
            optimizer.step()
        trainer.fit(x, y)
        same(trainer.get_state(), {n: t.detach().numpy() for n, t in start.items()}, 1e-4)


def test_the_second_training_of_a_structure_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    real = fused.step_program
    monkeypatch.setattr(fused, "step_program", lambda *a, **k: traced.append(1) or real(*a, **k))
    x, y = regression(rows=50, features=6)
    options: dict[str, Any] = {"backend": "fused", "loss": "elastic", "batch_size": 8, "seed": 77}
    first = make(models.mlp(), **options)
    first.fit(x, y)
    assert traced
    traced.clear()
    second = make(models.mlp(), **options)
    second.fit(x, y)
    assert not traced
    same(second.get_state(), first.get_state(), 0)


def colors(names: list[str]) -> onnx.ModelProto:
    """A frozen string constant that the input is compared with, and a trained weight."""
    model = models.parsed(
        "same = Equal(X, names)  codes = Cast<to = 1>(same)  Y = MatMul(codes, W)",
        {"W": np.ones((3, 1))},
        "string[N, 3] X",
        "float[N, 1] Y",
        opset=19,
    )
    constant = onnx.helper.make_tensor("names", onnx.TensorProto.STRING, [3], names)
    model.graph.initializer.append(constant)
    return model


def test_strings_of_a_model_are_compared_by_their_values() -> None:
    """An array of strings has addresses as its bytes, which differ in each reading of the same file."""
    one, again, other = (
        problem_key(internals_of(make(colors(n))).problem)
        for n in (["red", "green", "blue"], ["red", "green", "blue"], ["red", "green", "black"])
    )
    assert one == again
    assert one != other


def test_the_processes_are_no_part_of_a_problem() -> None:
    """Ranks share programs by their problems, and each has an object of its own for its messages."""
    problem = internals_of(make(models.mlp())).problem
    assert attrs.evolve(problem, peers=object()) == problem  # type: ignore[arg-type]


def test_a_checkpoint_knows_the_versions_of_every_component() -> None:
    """The distribution of a component whose code changes the result is compared when a run is resumed."""
    options: dict[str, Any] = {"averaging": "ema", "penalty": "l2", "transforms": ["centralize"]}
    options |= {"constraint": {"W1": "max_norm"}, "precision": "fp16_mixed"}
    setup = internals_of(make(models.mlp(), **options)).setup
    kinds = [kind for kind, component in fingerprint.components(setup) if component is not None]
    expected = ["averages", "constraints", "devices", "losses", "optimizers", "penalties"]
    assert sorted(kinds) == sorted([*expected, "precisions", "schedules", "transforms"])
    plain = dict(fingerprint.components(internals_of(make(models.mlp())).setup))
    assert "averages" not in plain


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


class MatricesDecay(Optimizer):
    """Momentum that leaves biases without decay."""

    name, default_rate, slots = "matrices_decay", 0.02, ("velocity",)

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        if weight.rank > 1:
            gradient = gradient + 0.1 * weight
        velocity = 0.9 * slots["velocity"] + gradient
        return weight - rate * velocity, {"velocity": velocity}


class MatricesCentered(Optimizer):
    """Plain descent along the gradient, whose mean a matrix leaves out."""

    name, default_rate = "matrices_centered", 0.02

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
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
