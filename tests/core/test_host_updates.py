"""Updates of large parameters by numpy, compared with the same updates in the graph of the step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    Optimizer,
    Trainer,
    TrainingDiverged,
    host_formulas,
    internals_of,
)
from ortflex_core.training.engines import host_updates
from ortflex_plugins.backends import fused
from tests import models
from tests.training import make, plugins, regression, same

ELEMENTWISE = ["adadelta", "adagrad", "adam", "adamax", "adamw", "momentum", "nadam", "nesterov"]
ELEMENTWISE += ["radam", "rmsprop"]
OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "penalty and clip_norm": {"penalty": "l2", "clip_norm": 0.5},
    "transforms": {"transforms": ["centralize"]},
    "average": {"averaging": "ema"},
    "constraint": {"constraint": {"W1": "non_negative"}},
    "pruning": {"constraint": {"name": "sparsity", "share": 0.75}},
    "pruning of channels": {"constraint": {"name": "sparsity", "method": "channels"}},
    "group": {"groups": [{"params": ["W1"], "rate": 0.3, "optimizer": "rmsprop"}]},
    "later group": {"groups": [{"params": ["W2"], "start_epoch": 2}]},
    "two threads": {"threads": 2},
    "two batches": {"accumulate": 2},
    "two batches, penalty and clip_norm": {"accumulate": 2, "penalty": "l2", "clip_norm": 0.5},
    "schedule": {"schedule": "cosine"},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parameters count as large, and have several blocks, the last of which is shorter."""
    monkeypatch.setattr(host_updates, "_LARGE", 6)
    monkeypatch.setattr(host_updates, "_BLOCK", 7)


X, Y = regression(features=6, rows=37)


def trained(
    model: Any = None, in_graph: bool = False, data: tuple[Any, Any] = (X, Y), **options: Any
) -> Trainer:
    """A trainer after four epochs, whose last batches are shorter."""
    with pytest.MonkeyPatch.context() as patch:
        if in_graph:
            patch.setattr(fused, "host_formulas", lambda problem: {})
        arguments = {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 10, "epochs": 4}
        trainer = make(model or models.mlp(), backend="fused", **arguments | options)
        trainer.fit(*data)
    return trainer


def on_host(trainer: Trainer) -> list[str]:
    return sorted(host_formulas(internals_of(trainer).problem))


def assert_equal(found: Trainer, expected: Trainer) -> None:
    same(found.get_state(), expected.get_state())
    same(found.engine.slots(), expected.engine.slots())
    np.testing.assert_allclose(found.history_["loss"], expected.history_["loss"], rtol=1e-6)


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_an_optimizer_has_the_same_results(optimizer: str) -> None:
    found = trained(optimizer=optimizer)
    if optimizer in ("adam", "adamw", "momentum", "rmsprop", "adadelta"):
        assert on_host(found) == ["W1", "W2", "b1"]  # else the graph is compared with itself
    assert_equal(found, trained(in_graph=True, optimizer=optimizer))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_an_option_has_the_same_results(options: dict[str, Any]) -> None:
    found = trained(**options)
    assert on_host(found)
    assert_equal(found, trained(in_graph=True, **options))


def test_float64_has_the_same_results() -> None:
    model = models.in_float64(models.linear(features=6))
    found = trained(model)
    assert on_host(found) == ["coef"]
    assert_equal(found, trained(model, in_graph=True))


def test_gradients_for_numpy_are_written_without_a_copy() -> None:
    """The gradient of a convolution is a matrix in the graph; a Reshape to an output would copy it."""
    images = np.random.default_rng(0).standard_normal((48, 4, 12, 12), dtype=np.float32)
    targets = np.random.default_rng(1).standard_normal((48, 48), dtype=np.float32)
    kernels = {"K1": (8, 4, 3, 3), "K2": (3, 8, 3, 3)}
    model = models.of_text(
        """(float[N, 4, 12, 12] X) => (float[N, 48] Y) {
            H1 = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(X, K1)
            H2 = Tanh(H1)  H3 = Conv(H2, K2)  Y = Flatten(H3) }""",
        kernels,
    )
    options: dict[str, Any] = {"batch_size": 16, "optimizer": "momentum", "learning_rate": 1e-4}
    plain, trainer = (trained(model, way, (images, targets), **options) for way in (True, False))
    np.testing.assert_allclose(trainer.history_["loss"], plain.history_["loss"], rtol=1e-6)
    graphs = [g for n, g in trainer.save_onnx_graph().items() if n.startswith("step")]
    gradients = [o.name for o in graphs[0].graph.output if o.name.startswith("gradient")]
    copied = [n for g in graphs for n in g.graph.node if n.op_type == "Reshape"]
    assert len(gradients) == 2
    assert not {o for n in copied for o in n.output} & set(gradients)


class Earlier(Optimizer):
    """Moves by the mean of the gradient and the step before; reads old values late."""

    name, default_rate, slots = "earlier", 0.01, ("m", "before")

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        m = 0.5 * slots["m"] + 0.5 * gradient * gradient
        new = weight - rate * gradient / (op.Sqrt(m) + 1e-3) - 0.1 * (weight - slots["before"])
        return new, {"m": m + 0.01 * op.Abs(slots["m"]), "before": weight * 1.0}


class Passing(Earlier):
    """Its slot becomes the gradient itself."""

    name = "passing"

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        new, after = super().update(op, weight, gradient, rate, step, slots)
        return new, {**after, "before": gradient}


@pytest.mark.parametrize("optimizer", [Earlier(), Passing()], ids=lambda o: o.name)
def test_an_update_that_reads_old_values_late_stays_in_the_graph(optimizer: Optimizer) -> None:
    found = trained(optimizer=optimizer)
    assert not on_host(found)
    assert_equal(found, trained(in_graph=True, optimizer=optimizer))


@pytest.mark.parametrize("optimizer", ["sgd", "lamb", "adafactor"])
def test_short_updates_and_those_with_norms_stay_in_the_graph(optimizer: str) -> None:
    assert not on_host(trained(optimizer=optimizer))


def test_the_tensors_of_the_updates_have_one_version() -> None:
    engine: Any = trained().engine
    for twins, own in ((engine._weights, ["W1"]), (engine._slots, ["m/W1", "v/W1"])):
        first, second = twins.versions
        assert all(first[name] is second[name] for name in own)
        small = "b3" if twins is engine._weights else "m/b3"
        assert first[small] is not second[small]


def test_a_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    plain = trained(epochs=2)
    plain.save(tmp_path / "run")
    resumed = Trainer.resume(tmp_path / "run", plugins=plugins())
    for trainer in (plain, resumed):
        trainer.fit(X, Y)
    same(resumed.get_state(), plain.get_state(), 0)


def test_a_diverged_training_restores_the_last_good_state() -> None:
    trainer = trained(check_finite=False)
    good = trainer.get_state()
    labels = Y.copy()
    labels[25] = np.inf
    with pytest.raises(TrainingDiverged):
        trainer.fit(X, labels)
    same(trainer.get_state(), good, 0)


@pytest.mark.parametrize("name", ["constraint", "group"])
def test_equal_layers_may_have_updates_of_their_own(name: str) -> None:
    """The constraint is a Relu, which stays in the graph; the other layer does not."""
    model, options = models.mlp((6, 6, 6, 1)), OPTIONS[name]
    found = trained(model, **options)
    assert set(on_host(found)) & {"W1", "W2"} == ({"W2"} if name == "constraint" else {"W1", "W2"})
    assert_equal(found, trained(model, in_graph=True, **options))
    plain = trained(model)
    assert not np.allclose(found.get_state()["W1"], plain.get_state()["W1"])
