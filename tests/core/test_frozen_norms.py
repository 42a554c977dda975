"""Nodes in inference mode: in a training where they are frozen, and in a file that is exported.

``batch_norm="auto"``: a BatchNormalization whose scale and bias are frozen is in inference mode. The class
of errors: training changes a tensor of the file that is not trained. The test is the export, compared with
the file initializer by initializer. A file that was exported in training mode can be written for inference.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ortflex_core import Array, CheckpointError, Model, Trainer
from ortflex_core.compiler.model.inference_mode import switch_to_inference, training_nodes
from ortflex_core.training.artifacts import checkpoint_record as record
from tests import edited_checkpoints, models
from tests.training import bits, every_backend, make, plugins

NORMS = [f"{part}{k}" for k in (1, 2) for part in ("scale", "bias", "mean", "var")]
STATISTICS = {"mean1", "var1", "mean2", "var2"}
AGENTS = ("training_agent", "training_session")


def network(**altered: Any) -> onnx.ModelProto:
    rng = np.random.default_rng(3)
    weights: dict[str, Array] = {
        "w1": rng.standard_normal((4, 5)),
        "w2": rng.standard_normal((5, 3)),
        "head": rng.standard_normal((3, 1)),
        "offset": np.zeros(1),
    }
    for k, width in ((1, 5), (2, 3)):
        weights |= {f"{part}{k}": rng.uniform(0.5, 1.5, width) for part in ("scale", "var")}
        weights |= {f"{part}{k}": rng.standard_normal(width) for part in ("bias", "mean")}
    norms = [", ".join(altered.get(n, n) for n in NORMS[k : k + 4]) for k in (0, 4)]
    norm = "BatchNormalization<momentum = 0.8>"
    return models.parsed(
        f"a = MatMul(X, w1)  b = {norm}(a, {norms[0]})  c = Relu(b)"
        f"  d = MatMul(c, w2)  e = {norm}(d, {norms[1]})  f = Relu(e)"
        "  g = MatMul(f, head)  Y = Add(g, offset)",
        weights,
        "float[N, 4] X",
        "float[N, 1] Y",
    )


def data(rows: int = 24) -> tuple[Array, Array]:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows, 4)).astype(np.float32)
    return x, x[:, :1] - x[:, 1:2]


def moved(trainer: Trainer, model: onnx.ModelProto) -> set[str]:
    """The initializers of the export that differ from the file."""
    file, out = models.weights_of(model), models.weights_of(trainer.export())
    assert out.keys() == file.keys()
    return {name for name, array in out.items() if not np.array_equal(array, file[name])}


def trained(backend: str = "fused", **options: Any) -> Trainer:
    trainer = make(network(), backend=backend, epochs=2, batch_size=8, **options)
    trainer.fit(*data())
    return trainer


@every_backend
def test_a_trained_head_leaves_everything_else_as_it_is(backend: str) -> None:
    trainer = trained(backend, params=["head", "offset"], learning_rate=0.01)
    assert moved(trainer, network()) == {"head", "offset"}
    assert moved(trained(backend, params="head", batch_norm="freeze"), network()) == {"head"}


@every_backend
@pytest.mark.parametrize("part", ["scale2", "bias2"])
def test_one_trained_tensor_of_a_node_trains_its_statistics(backend: str, part: str) -> None:
    if backend in AGENTS:
        pytest.skip("it refuses to update statistics")
    trainer = trained(backend, params=["head", part], learning_rate=0.01)
    assert moved(trainer, network()) == {"head", part, "mean2", "var2"}


def test_train_updates_the_statistics_of_frozen_nodes() -> None:
    assert moved(trained(params="head", batch_norm="train"), network()) == {"head", *STATISTICS}
    assert moved(trained(batch_norm="freeze"), network()).isdisjoint(STATISTICS)
    everything = trained()
    assert moved(everything, network()) >= STATISTICS
    assert bits(everything) == bits(trained(batch_norm="train"))


def test_adapters_freeze_the_statistics() -> None:
    trainer = trained(adapters={"name": "lora", "rank": 2, "targets": ["w1", "w2"]})
    assert moved(trainer, network()) == {"w1", "w2"}


def test_a_scale_that_is_computed_from_a_trained_tensor_is_not_frozen() -> None:
    proto = network(scale1="twice")
    proto.graph.node.insert(0, helper.make_node("Add", ["scale1", "scale1"], ["twice"]))
    for params, more in ((["head"], set()), (["head", "scale1"], {"scale1", "mean1", "var1"})):
        trainer = make(proto, backend="fused", params=params, epochs=1, batch_size=8)
        trainer.fit(*data())
        assert moved(trainer, proto) == {"head", *more}


@pytest.mark.parametrize("accumulate", [1, 2])
@every_backend
def test_groups_that_start_later_decide_again(backend: str, accumulate: int) -> None:
    """Each epoch trains the statistics of the nodes that it trains; a new fit begins with none again."""
    if backend in AGENTS:
        pytest.skip("it refuses to update statistics")
    seen: list[dict[str, Array]] = []

    def epoch_end(trainer: Trainer) -> None:
        seen.append(trainer.get_state(buffers=True))

    groups = [{"params": ["scale2", "bias2"], "start_epoch": 1}]
    options: dict[str, Any] = {"params": ["head", "scale2", "bias2"], "groups": groups}
    options |= {"epochs": 2, "batch_size": 8, "accumulate": accumulate, "callbacks": [epoch_end]}
    trainer = make(network(), backend=backend, **options)
    mean = models.weights_of(network())["mean2"]
    trainer.fit(*data())
    np.testing.assert_array_equal(seen[0]["mean2"], mean)
    assert not np.array_equal(seen[1]["mean2"], mean)
    trainer.fit(*data())
    np.testing.assert_array_equal(seen[2]["mean2"], seen[1]["mean2"])
    assert not np.array_equal(seen[3]["var2"], seen[1]["var2"])
    assert moved(trainer, network()) == {"head", "scale2", "bias2", "mean2", "var2"}
    np.testing.assert_array_equal(seen[3]["mean2"], trainer.get_state(buffers=True)["mean2"])


def test_a_checkpoint_keeps_the_mode_that_it_recorded(tmp_path: Path) -> None:
    folder = trained(params="head", batch_norm="train").save(tmp_path / "old")
    resumed = Trainer.resume(folder, plugins=plugins(), epochs=3)
    resumed.fit(*data())
    assert moved(resumed, network()) == {"head", *STATISTICS}


def test_modes_that_decide_alike_are_one(tmp_path: Path) -> None:
    """A checkpoint that recorded "train" is restored by a Trainer with the default, and goes on alike."""
    folder = trained(batch_norm="train").save(tmp_path / "all")
    make(network(), backend="fused", epochs=2, batch_size=8).restore(folder)
    head = trained(params="head", batch_norm="train").save(tmp_path / "head")
    with pytest.raises(CheckpointError, match="batch_norm: was 'train', is 'auto'"):
        make(network(), backend="fused", params="head", batch_size=8).restore(head)


def test_a_record_without_the_mode_means_train(tmp_path: Path) -> None:
    folder = trained(params="head").save(tmp_path / "run")
    edited_checkpoints.edit(folder, lambda table: table["arguments"].pop("batch_norm"))
    assert record.read(folder).arguments["batch_norm"] == "train"


RNG = np.random.default_rng(0)


def in_training_mode(flag: str = "initializer") -> onnx.ModelProto:
    weights = {"W": RNG.standard_normal((4, 3)), "V": RNG.standard_normal((3, 1))}
    weights |= {"scale": np.ones(3), "shift": np.ones(3), "mean": RNG.standard_normal(3)}
    weights |= {"var": np.array([0.5, 1.0, 2.0]), "ratio": np.array(0.5)}
    mode = "mode = Constant<value = bool {1}>()  "
    if flag == "initializer":
        weights["mode"], mode = np.array(True), ""
    model = models.parsed(
        f"{mode}h = MatMul(X, W)  n, new_mean, new_var = "
        "BatchNormalization<training_mode = 1>(h, scale, shift, mean, var)"
        "  d = Dropout(n, ratio, mode)  Y = MatMul(d, V)",
        weights,
        "float[N, 4] X",
        "float[N, 1] Y, float[3] new_mean",
    )
    model.graph.node[-3].name, model.graph.node[-2].name = "norm", "drop"
    return model


@pytest.mark.parametrize("flag", ["initializer", "node"])
def test_statistics_are_used_and_nothing_is_dropped(flag: str) -> None:
    model = in_training_mode(flag)
    assert training_nodes(model) == ["BatchNormalization 'norm'", "Dropout 'drop'"]
    switch_to_inference(model)
    assert training_nodes(model) == []
    onnx.checker.check_model(model, full_check=True)
    values = {o for n in model.graph.node for o in n.output}
    assert "mode" not in values | {t.name for t in model.graph.initializer}
    w = models.weights_of(model)
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    made = models.predict(model, {"X": x})
    n = (x @ w["W"] - w["mean"]) / np.sqrt(w["var"] + 1e-5) + 1
    np.testing.assert_allclose(made["Y"], n @ w["V"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(made["new_mean"], w["mean"])


def test_nodes_of_branches_and_modes_that_are_fed() -> None:
    model = models.parsed(
        "Y = If(which) <then_branch = t () => (float[N, 4] in) { in = Dropout(X, ratio, mode) }, "
        "else_branch = e () => (float[N, 4] out) { out = Dropout(X, ratio, fed) }>",
        {"ratio": np.array(0.5), "mode": np.array(True)},
        "float[N, 4] X, bool which, bool fed",
        "float[N, 4] Y",
    )
    model.graph.node[0].attribute[0].g.node[0].name = "inner"
    assert training_nodes(model) == ["Dropout 'inner'"]
    switch_to_inference(model)
    x = np.ones((2, 4), np.float32)
    feeds = {"X": x, "which": np.array(True), "fed": np.array(False)}
    np.testing.assert_array_equal(models.predict(model, feeds)["Y"], x)


def test_exports_keep_the_mode_with_a_warning_unless_inference_is_requested(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = in_training_mode()
    del model.graph.output[1:]
    trainer = make(model, backend="fused", epochs=1)
    x = RNG.standard_normal((16, 4)).astype(np.float32)
    trainer.fit(x, x[:, :1])
    with caplog.at_level(logging.WARNING, "ortflex"):
        assert training_nodes(trainer.export())
    assert "is in training mode (BatchNormalization 'norm', Dropout 'drop')" in caplog.text
    assert "export(inference=True)" in caplog.text
    caplog.clear()
    made = trainer.export(inference=True)
    assert not caplog.text
    assert not training_nodes(made)
    np.testing.assert_allclose(
        models.predict(made, {"X": x})["Y"], trainer.predict(x, "Y"), rtol=1e-4, atol=1e-5
    )
    assert Model(made).initializers.keys() >= {"mean", "var"}
