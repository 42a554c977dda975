"""Every part of a training in a portable step: losses, penalties, transforms, groups, averages, masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

from ortflex_core import apply_state, open_step
from ortflex_core.compiler.runtime.installation import version_tuple
from tests import models
from tests.core.test_statistics import COPIES, LAYERS, network
from tests.end_to_end.portable_cases import (
    NETWORKS,
    batches,
    columns,
    compare_exports,
    compare_state,
    compare_steps,
    compile_for,
    fused,
    network_trainer,
    runner,
    steps_of_fused,
    workload,
)
from tests.training import regression

RNG = np.random.default_rng(3)
X, Y = regression(72, 6)
WEIGHT = RNG.uniform(0, 2, 72).astype(np.float32)
WEIGHT[::7] = 0
CLASSES = RNG.integers(0, 3, 72)
CLASSES[::5] = -100

BOTH = pytest.mark.parametrize("fixed", [True, False], ids=["rows", "any rows"])
PLAIN, WEIGHTED = batches(X, Y, None, 12), batches(X, Y, WEIGHT, 12)
TRAININGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimizer": "adam"},
    "penalties": {"penalty": {"W*": {"name": "l2", "l2": 0.01}, "b*": {"name": "l1", "l1": 0.02}}},
    "clipping": {"clip_norm": 0.5, "clip_value": 0.1, "optimizer": "momentum"},
    "noise": {"transforms": [{"name": "noise", "eta": 0.1}, "centralize"], "optimizer": "adam"},
    "constraint": {"constraint": {"name": "max_norm"}, "learning_rate": 0.3},
    "ema": {"averaging": "ema", "optimizer": "adam"},
    "swa": {"averaging": {"name": "swa"}, "optimizer": "adamw"},
    "groups": {
        "groups": [
            {"params": "W1", "rate": 0.1},
            {"params": "b*", "optimizer": "adam", "penalty": {"name": "l2", "l2": 0.1}},
            {"params": "W2", "frozen": True},
        ]
    },
    "shared state": {"optimizer": "prodigy"},
    "factored state": {"optimizer": "adafactor"},
    "lamb": {"optimizer": "lamb"},
    "radam": {"optimizer": "radam", "loss": "huber"},
    "sum": {"reduction": "sum", "learning_rate": 1e-3},
    "adapters, half precision": {
        "adapters": {"name": "lora", "rank": 1, "dropout": 0.3},
        "precision": "fp16_mixed",
        "optimizer": "adam",
    },
}
IGNORING = {"name": "softmax_cross_entropy", "ignore_index": -100, "class_weight": [1.0, 2.0, 0.5]}
OF_CLASSES = {"loss": IGNORING, "optimizer": "nesterov", "learning_rate": 0.05}
ADDED = {"accumulate": 3, "optimizer": "adam", "clip_norm": 1.0, "penalty": "l2"}
STATISTICS = {"batch_norm": "train", "dropout": 0.4, "seed": 5}
DROPPING = COPIES + LAYERS.replace("y = MatMul (n2, v)", "d = Dropout (n2)\n y = MatMul (d, v)")
TWO_LOSSES = {
    "amount": {"name": "absolute_error", "factor": 0.5},
    "scores": {"name": "softmax_cross_entropy", "factor": 1.5},
}


def random_batches() -> list[Any]:
    """Batches of six rows for :func:`network`."""
    x, y = (RNG.standard_normal((24, size)).astype(np.float32) for size in (3, 1))
    return batches(x, y, None, 6)


def two_headed_batches() -> list[Any]:
    """Batches of eight rows for ``models.two_headed``."""
    rng = np.random.default_rng(0)
    left, right, amount = (rng.standard_normal((24, n)).astype(np.float32) for n in (3, 2, 1))
    scores = rng.integers(0, 3, 24)
    return [
        (
            {"left": left[p], "right": right[p]},
            {"label/amount": amount[p], "label/scores": scores[p]},
        )
        for p in (slice(k, k + 8) for k in range(0, 24, 8))
    ]


CASES: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
    **{name: (models.mlp(), options, PLAIN) for name, options in TRAININGS.items()},
    "weights": (models.mlp(), {"optimizer": "adam"}, WEIGHTED),
    "weights, sum": (models.mlp(), {"optimizer": "adam", "reduction": "sum"}, WEIGHTED),
    "ignored class": (models.classifier(6), OF_CLASSES, batches(X, CLASSES, None, 12)),
    "ignored class, weights": (models.classifier(6), OF_CLASSES, batches(X, CLASSES, WEIGHT, 12)),
    "two losses": (
        models.two_headed(),
        {"loss": TWO_LOSSES, "optimizer": "adam", "penalty": "l2"},
        two_headed_batches(),
    ),
    "accumulation": (models.mlp(), ADDED, PLAIN),
    "accumulation, weights": (models.mlp(), ADDED, WEIGHTED),
    "statistics, dropout": (network(DROPPING), STATISTICS, random_batches()),
    "statistics, accumulation": (
        network(DROPPING),
        STATISTICS | {"accumulate": 2},
        random_batches(),
    ),
}
"""A model, the arguments of its Trainer, and batches."""


@BOTH
@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_a_training_makes_the_steps_of_fused(tmp_path: Path, name: str, fixed: bool) -> None:
    model, options, given = CASES[name]
    trainer = fused(model, **{"learning_rate": 0.01, **options})
    step = compare_steps(trainer, tmp_path / "step", given, 10, fixed=fixed)
    assert step.manifest["batches_per_run"] == options.get("accumulate", 1)


def test_a_batch_whose_weights_are_zero_moves_nothing_but_the_slots(tmp_path: Path) -> None:
    given = [(X[:8], Y[:8], WEIGHT[:8]), (X[8:16], Y[8:16], np.zeros(8, np.float32))]
    trainer = fused(models.mlp(), learning_rate=0.1)
    step = compare_steps(trainer, tmp_path / "step", given, 4, fixed=True)
    assert step.run([columns(given[1])]) == 0.0


def test_accumulation_of_batches_of_different_sizes(tmp_path: Path) -> None:
    trainer = fused(models.mlp(), accumulate=2, learning_rate=0.05)
    given = [(X[:12], Y[:12]), (X[12:19], Y[12:19])]
    compare_steps(trainer, tmp_path / "step", given, 4, fixed=False)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_steps_a_run_are_those_of_fused(tmp_path: Path, accumulate: int) -> None:
    trainer = fused(
        models.mlp(), at_once=3, optimizer="adam", averaging="ema", accumulate=accumulate
    )
    given = batches(X, Y, WEIGHT, 6)
    compile_for(trainer, given[0], fixed=True)
    trainer.export_step(tmp_path / "step", rows=6, steps_per_run=3)
    step = runner().Step(tmp_path / "step")
    assert step.manifest["batches_per_run"] == 3 * accumulate
    shown = fused(models.mlp(), at_once=1, optimizer="adam", averaging="ema", accumulate=accumulate)
    compile_for(shown, given[0], fixed=True)
    for k in range(4):
        parts = [given[(k * 3 * accumulate + j) % len(given)] for j in range(3 * accumulate)]
        costs = step.run([columns(part) for part in parts])
        expected = steps_of_fused(shown, parts)
        np.testing.assert_allclose(costs, expected, rtol=1e-4)
    for item in step.moving:
        if item["role"] == "parameter":
            ours = shown.get_state()[item["of"]]
            np.testing.assert_allclose(step.state[item["in"]], ours, rtol=1e-4, atol=1e-6)
    assert step.state["step"] == 12


def test_float64_models(tmp_path: Path) -> None:
    if version_tuple(ort.__version__) < (1, 17):
        pytest.skip("1.16 fuses Gemm and Tanh of float64, for which it has no kernel")
    model = models.mlp()
    for k, tensor in enumerate(model.graph.initializer):
        wide = numpy_helper.to_array(tensor).astype(np.float64)
        model.graph.initializer[k].CopyFrom(numpy_helper.from_array(wide, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    trainer = fused(model, optimizer="adam")
    wide_batches = batches(X.astype(np.float64), Y.astype(np.float64), None, 12)
    compare_steps(trainer, tmp_path / "step", wide_batches, 8, fixed=True)


def test_several_inputs_and_names_that_the_step_uses_itself(tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> '
        "net (float[N, 3] step, float[N, 2] loss) => (float[N, 1] penalty)"
        "{ a = MatMul (step, learning_rate) b = MatMul (loss, state) penalty = Add (a, b) }"
    )
    for name, size in (("learning_rate", 3), ("state", 2)):
        array = RNG.standard_normal((size, 1)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    trainer = fused(model, optimizer="adam")
    given = [
        ({"step": X[k : k + 8, :3], "loss": X[k : k + 8, 3:5]}, Y[k : k + 8]) for k in (0, 8, 16)
    ]
    compare_exports_of_named(trainer, tmp_path, given)


def compare_exports_of_named(trainer: Any, folder: Path, given: Any) -> None:
    """As compare_steps, with inputs by their names."""
    compile_for(trainer, given[0], fixed=False)
    trainer.export_step(folder / "step")
    step = runner().Step(folder / "step")
    manifest = open_step(folder / "step").manifest
    place = {i.role: i.new for i in manifest.step if i.new is not None}
    for batch in given:
        feeds = dict(step.state)
        for item in manifest.step:
            if item.role == "data":
                feeds[str(item.name)] = batch[0][item.of]
            if item.role == "label":
                feeds[str(item.name)] = batch[1]
        names = [o.name for o in step.session.get_outputs()]
        out = dict(zip(names, step.session.run(None, feeds), strict=True))
        step.state = {i["in"]: out[i["out"]] for i in step.moving}
        assert out[str(place["loss"])] == trainer.step(batch)
    compare_state(trainer, step)
    compare_exports(trainer, folder / "step", step)


def test_prediction_graph_predicts_with_averages_and_statistics(tmp_path: Path) -> None:
    trainer = fused(network(), batch_norm="train", averaging="ema")
    given = random_batches()
    step = compare_steps(trainer, tmp_path / "step", given, 5, fixed=True)
    session = ort.InferenceSession(tmp_path / "step" / "predict.onnx")
    wanted = {i.name for i in session.get_inputs()}
    feeds = {name: array for name, array in step.state.items() if name in wanted}
    (prediction,) = session.run(None, {**feeds, "x": given[0][0]})
    np.testing.assert_array_equal(prediction, trainer.predict(given[0][0]))


def test_frozen_weights_are_in_both_graphs_and_large_ones_in_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ortflex_core.compiler.onnx_files import model_file

    model = models.mlp((60, 50, 1))
    wide = RNG.standard_normal((24, 60)).astype(np.float32)
    trainer = fused(model, params=["!W1"], optimizer="adam")
    given = batches(wide, Y[:24], None, 6)
    compare_steps(trainer, tmp_path / "inside" / "step", given, 4, fixed=True)
    assert not (tmp_path / "inside" / "step" / "frozen.data").exists()
    monkeypatch.setattr(model_file, "HUGE", 1000)
    fresh = fused(model, params=["!W1"], optimizer="adam")
    compare_steps(fresh, tmp_path / "outside" / "step", given, 4, fixed=True)
    assert (tmp_path / "outside" / "step" / "frozen.data").stat().st_size == 4 * 60 * 50


def test_a_group_that_starts_later_is_named_and_its_state_is_kept(tmp_path: Path) -> None:
    groups = [{"params": "W1", "start_epoch": 2}]
    trainer = fused(models.mlp(), groups=groups, optimizer="adam", reinitialize=True)
    given = batches(X, Y, None, 12)
    compare_steps(trainer, tmp_path / "step", given, 3, fixed=True)
    manifest = open_step(tmp_path / "step").manifest
    assert [(m.what, m.name) for m in manifest.not_portable] == [("group", "W1")]


def test_training_information_of_large_models_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ortflex_core.compiler.onnx_files import model_file

    X, y = regression(16, 5)
    trainer = fused(models.mlp((5, 400, 1)), params=["!W1"])
    compile_for(trainer, (X, y), fixed=False)
    trainer.export_step(tmp_path / "small")
    assert (tmp_path / "small" / "training_info.onnx").exists()
    monkeypatch.setattr(model_file, "HUGE", 2**12)
    trainer.export_step(tmp_path / "large")
    assert not (tmp_path / "large" / "training_info.onnx").exists()
    (one,) = open_step(tmp_path / "large").manifest.not_portable
    assert (one.what, one.name) == ("file", "training_info.onnx")
    assert "at most 2 GB" in one.why


def test_what_is_not_portable_is_named(tmp_path: Path) -> None:
    trainer = fused(
        models.mlp(), schedule="plateau", metrics=["rmse"], callbacks=["early_stopping"]
    )
    trainer.export_step(tmp_path / "step", X, Y)
    missing = open_step(tmp_path / "step").manifest.not_portable
    assert [(m.what, m.name) for m in missing] == [
        ("schedule", "plateau"),
        ("metric", "rmse"),
        ("callback", "EarlyStopping"),
    ]
    assert "History" in missing[0].why
    plain = fused(models.mlp())
    plain.export_step(tmp_path / "plain", X, Y)
    assert open_step(tmp_path / "plain").manifest.not_portable == ()


def test_the_same_step_is_exported_with_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        fused(models.mlp(), optimizer="adam").export_step(tmp_path / name, X, Y, rows=8)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_standard_operators_only(tmp_path: Path) -> None:
    fused(models.conv_net(), loss="softmax_cross_entropy", optimizer="adam").export_step(
        tmp_path / "step",
        RNG.standard_normal((4, 3, 6, 6)).astype(np.float32),
        np.arange(4),
    )
    for name in ("step.onnx", "predict.onnx"):
        model = onnx.load(tmp_path / "step" / name)
        assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
        onnx.checker.check_model(model, full_check=True)


def test_apply_state_to_the_trained_file_again(tmp_path: Path) -> None:
    trainer = fused(models.mlp(), learning_rate=0.01)
    compare_steps(trainer, tmp_path / "step", batches(X, Y, None, 12), 3, fixed=True)
    applied = tmp_path / "applied" / "model.onnx"
    apply_state(applied, tmp_path / "step", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == applied.read_bytes()


QUICK = {"W1", "W5", "W6", "vision mlp", "sequence autoencoder"}


def slow_but(names: object) -> list[object]:
    every: list[str] = list(names)  # type: ignore[call-overload]
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in every]


@BOTH
@pytest.mark.parametrize("name", slow_but(f"W{k}" for k in range(1, 9)))
def test_a_hundred_steps_of_workloads(tmp_path: Path, name: str, fixed: bool) -> None:
    trainer, given = workload(name)
    compare_steps(trainer, tmp_path / "step", given, 100, fixed=fixed)


@BOTH
@pytest.mark.parametrize("name", slow_but(NETWORKS))
def test_a_hundred_steps_of_networks(tmp_path: Path, name: str, fixed: bool) -> None:
    pytest.importorskip("torch")
    if name.startswith("dynamo"):
        pytest.importorskip("onnxscript")
    optimizer = "adam" if list(NETWORKS).index(name) % 2 else "sgd"
    trainer, given = network_trainer(name, optimizer)
    compare_steps(trainer, tmp_path / "step", given, 100, fixed=fixed)
