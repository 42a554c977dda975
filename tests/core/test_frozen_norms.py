"""``batch_norm="auto"``: a BatchNormalization whose scale and bias are frozen is in inference mode.

The class of errors: training changes a tensor of the file that is not trained. The test is the
export, compared with the file initializer by initializer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from ortflex_core import Array, CheckpointError, Trainer, hook
from ortflex_core.training.artifacts import checkpoint_record as record
from tests import edited_checkpoints, models
from tests.training import every_backend, make, plugins

NORMS = {f"{part}{k}": () for k in (1, 2) for part in ("scale", "bias", "mean", "var")}
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
        weights |= {
            f"scale{k}": rng.uniform(0.5, 1.5, width),
            f"bias{k}": rng.standard_normal(width),
            f"mean{k}": rng.standard_normal(width),
            f"var{k}": rng.uniform(0.5, 1.5, width),
        }
    norms = [", ".join(altered.get(n, n) for n in list(NORMS)[k : k + 4]) for k in (0, 4)]
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
    file = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    out = {t.name: numpy_helper.to_array(t) for t in trainer.export().graph.initializer}
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
    same = trained(batch_norm="train").get_state(buffers=True)
    for name, array in everything.get_state(buffers=True).items():
        np.testing.assert_array_equal(array, same[name], err_msg=name)


def test_adapters_freeze_the_statistics() -> None:
    """Adapters freeze the weights that they are added to, and all others."""
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

    class Watch:
        @hook
        def epoch_end(self, trainer: Trainer) -> None:
            seen.append(trainer.get_state(buffers=True))

    groups = [{"params": ["scale2", "bias2"], "start_epoch": 1}]
    options: dict[str, Any] = {"params": ["head", "scale2", "bias2"], "groups": groups}
    options |= {"epochs": 2, "batch_size": 8, "accumulate": accumulate, "callbacks": [Watch()]}
    trainer = make(network(), backend=backend, **options)
    file = {t.name: numpy_helper.to_array(t) for t in network().graph.initializer}
    trainer.fit(*data())
    np.testing.assert_array_equal(seen[0]["mean2"], file["mean2"])
    assert not np.array_equal(seen[1]["mean2"], file["mean2"])
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
    restored = make(network(), backend="fused", epochs=2, batch_size=8)
    restored.restore(folder)
    head = trained(params="head", batch_norm="train").save(tmp_path / "head")
    with pytest.raises(CheckpointError, match="batch_norm: was 'train', is 'auto'"):
        make(network(), backend="fused", params="head", batch_size=8).restore(head)


def test_a_record_without_the_mode_means_train(tmp_path: Path) -> None:
    folder = trained(params="head").save(tmp_path / "run")
    edited_checkpoints.edit(folder, lambda table: table["arguments"].pop("batch_norm"))
    assert record.read(folder).arguments["batch_norm"] == "train"
