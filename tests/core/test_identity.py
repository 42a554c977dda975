"""Which problems share their compiled graphs, and which must not."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortflex_core import Loss, hyper, internals_of, problem_key
from ortflex_core.training import fingerprint
from tests import models
from tests.training import BACKENDS, make, regression, same


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
        @attrs.frozen(kw_only=True)
        class Mine(Loss):
            name: ClassVar[str] = "mine"
            weight: float = hyper(default=1.0)

            def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
                return sign * self.weight * op.Abs(predicted - expected)

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


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
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
    from ortflex_plugins.backends import fused

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
