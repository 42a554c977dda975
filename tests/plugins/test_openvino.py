"""The backend openvino next to fused: the same losses, weights and gradients, and what it refuses."""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import (
    Array,
    Batch,
    DataError,
    Port,
    Trace,
    Trainer,
    TrainingDiverged,
    Unsupported,
    build,
    gradients,
)
from ortflex_core.compiler.runtime import session
from ortflex_core.testing import running, step_programs
from ortflex_plugins.backends.openvino.backend import OpenVinoBackend
from ortflex_plugins.backends.openvino.compiled import Hints, compile_program
from tests import models
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data
from tests.gradcheck import RULES, declared, run, traced
from tests.plugins.compiled_training import CompiledTraining, agree, fitted
from tests.plugins.damaged_files import WAYS, damage
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_samples import every_case
from tests.training import make, regression

openvino = pytest.importorskip("openvino")


class TestTraining(CompiledTraining):
    backend = "openvino"
    tolerance = 2e-4


@pytest.mark.parametrize("name", ["W4", "W7", "W8"])
def test_openvino_makes_the_steps_of_a_large_workload_as_fused_does(name: str) -> None:
    # One step of a whole batch and one of half as many rows. In W8 the gradient of a bias of keys is
    # zero but for rounding, and Adam would make steps of it.
    options = {"optimizer": "sgd", "learning_rate": 0.01} if name == "W8" else {}
    trainers = [fitted(name, b, epochs=1, steps=2, **options) for b in ("openvino", "fused")]
    agree(*trainers, 2e-3)


def test_openvino_in_bfloat16_follows_the_losses_of_float32() -> None:
    if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no arithmetic for bfloat16")
    exact, rounded = (
        fitted("W3", {"name": "openvino", "inference_precision": precision}, epochs=2)
        for precision in ("f32", "bf16")
    )
    np.testing.assert_allclose(rounded.train_losses_, exact.train_losses_, rtol=0.02)
    # Equal losses would show that the hint had no effect.
    assert not np.array_equal(rounded.train_losses_, exact.train_losses_)


def test_openvino_keeps_the_state_inside_and_holds_several_steps_in_a_graph() -> None:
    trainer = fitted("W5", "openvino", epochs=3, steps=9)
    # Eight whole batches and the shorter one, three times.
    assert trainer.engine.steps_per_run == 8
    assert trainer.engine.counters() == {"steps": 27, "runs": 6}
    (plan, _) = trainer.engine._plans.values()
    assert len(plan._states) == len(trainer.get_state())
    alone = fitted("W5", {"name": "openvino", "steps_per_run": 1}, epochs=3, steps=9)
    assert alone.engine.counters() == {"steps": 27, "runs": 27}
    agree(alone, trainer, 1e-5)


def test_openvino_notices_a_value_that_is_not_finite_behind_a_relu() -> None:
    x, y, _ = data(WORKLOADS["W1"])
    x = x[:30].copy()
    x[17] = np.nan
    options = {"loss": "squared_error", "batch_size": 15, "shuffle": False, "progress": False}
    options |= {"check_finite": False}
    trainer = Trainer(network(WORKLOADS["W1"]), backend="openvino", epochs=2, **options)
    before = trainer.get_state()
    with pytest.raises(TrainingDiverged):
        trainer.fit(x, y[:30])
    for name, array in trainer.get_state().items():
        assert np.array_equal(array, before[name])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_openvino_drops_what_fused_drops(accumulate: int) -> None:
    made = step_programs.draw("mlp, dropping", "sgd", "squared_error", alone=True)
    trainers = []
    for backend in ("openvino", "fused"):
        options = {**made.options, "epochs": 3, "accumulate": accumulate}
        trainers.append(running.trainer(made.model, backend=backend, **options))
        trainers[-1].fit(made.x, made.y)
    agree(*trainers, 1e-5)


@pytest.mark.parametrize("stateful", [True, False])
def test_openvino_compiles_states_that_stay_or_become_another_one(stateful: bool) -> None:
    trace = Trace({"": 17})
    w, m = Port("parameter", of="w"), Port("slot", of="w", slot="m")
    k = Port("slot", of="w", slot="k")
    data = Port("data", of="x")
    old, kept, x = (trace.input(port, onnx.TensorProto.FLOAT, (2,)) for port in (w, m, data))
    # A weight that moves, a slot that stays, and a slot that becomes the old weight.
    program = build(trace, {w: old + x, m: kept, k: old}, name="states")
    made = compile_program(program, {data: (2,)}, threads=1, hints=Hints(), stateful=stateful)
    assert set(made.states) == ({w} if stateful else set())
    request = made.request()
    given = {w: [2, 3], m: [5, 6], data: [1, 1]}
    arrays = {port: np.array(values, np.float32) for port, values in given.items()}
    variables = {v.name: v for v in request.query_state()}
    for port, array in arrays.items():
        if port in made.states:
            variables[made.states[port]].state = openvino.Tensor(array)
        else:
            request.set_tensor(program.takes[port].name, openvino.Tensor(array))
    request.infer()
    for port, wanted in {w: [3, 4], m: [5, 6], k: [2, 3]}.items():
        if port in made.states:
            got = variables[made.states[port]].state
        else:
            got = request.get_tensor(program.gives[port].name)
        assert got.data.tolist() == wanted, port


def refused(model: onnx.ModelProto, x: Array, y: Array, match: str, **options: Any) -> None:
    trainer = running.trainer(model, **{"backend": "openvino", **options})
    with pytest.raises(Unsupported, match=match):
        trainer.step((x, y))


def test_openvino_names_the_node_of_an_operator_that_it_does_not_have() -> None:
    x, y = running.regression(rows=4)
    model = running.network_model()
    nodes = [
        onnx.helper.make_node("Unsqueeze", ["W1", "axes"], ["deep"]),
        onnx.helper.make_node("MatMul", ["turned", "deep"], ["square"]),
        onnx.helper.make_node("Det", ["square"], ["det"], name="the determinant"),
        onnx.helper.make_node("Transpose", ["deep"], ["turned"], perm=[0, 2, 1]),
        onnx.helper.make_node("Mul", ["Y0", "det"], ["Y"]),
    ]
    model.graph.node[-1].output[0] = "Y0"
    model.graph.node.extend([nodes[0], nodes[3], nodes[1], nodes[2], nodes[4]])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axes"))
    refused(model, x, y, r"OpenVINO has no operator Det \(node 'the determinant'\)", params=["W2"])


def test_openvino_refuses_what_it_would_compute_with_fewer_bits() -> None:
    x, y = running.regression(rows=4)
    model = models.in_float64(running.linear_model())
    refused(model, x.astype(np.float64), y.astype(np.float64), "has the type (float64|double)")
    refused(running.linear_model(), x, y, "inference_precision", precision="bf16_mixed")


def test_openvino_refuses_integers_of_more_than_32_bits() -> None:
    x, _ = running.regression(rows=4)
    options = {"loss": "softmax_cross_entropy", "backend": "openvino", "batch_size": 4}
    options["loss"] = {"name": "softmax_cross_entropy", "ignore_index": 2**40}
    trainer = running.trainer(running.linear_model(3), **options)
    with pytest.raises(DataError, match=r"32-bit integers.*1099511627776; use backend='fused'"):
        trainer.step((x, np.array([0, 1, 2**40, 2])))


def test_openvino_refuses_a_hint_that_the_processor_cannot_follow() -> None:
    x, y = running.regression(rows=4)
    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    for hint in ("bf16", "f16"):
        if hint.upper().replace("F16", "FP16" if hint == "f16" else "F16") not in able:
            backend = {"name": "openvino", "inference_precision": hint}
            refused(running.linear_model(), x, y, "no arithmetic for", backend=backend)
    wide = {"name": "openvino", "inference_precision": "f64"}
    with pytest.raises(Exception, match="must be one of f32, bf16, f16"):
        running.trainer(running.linear_model(), backend=wide)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_openvino_keeps_what_it_has_compiled_for_later(accumulate: int, tmp_path: Path) -> None:
    """What is read from the folder trains with the same bits."""
    plain = fitted("W6", "openvino", epochs=1, steps=4, accumulate=accumulate)
    files: list[dict[str, int]] = []
    folder = str(tmp_path / "new" / "cache")
    for _ in range(2):
        session._cache.clear()  # as in a new process
        backend = {"name": "openvino", "cache_folder": folder}
        kept = fitted("W6", backend, epochs=1, steps=4, accumulate=accumulate)
        files.append({p.name: p.stat().st_mtime_ns for p in Path(folder).iterdir()})
        assert kept.train_losses_ == plain.train_losses_
        for name, array in plain.get_state().items():
            np.testing.assert_array_equal(array, kept.get_state()[name])
    assert files[0]
    assert files[0] == files[1], "the second training compiles nothing"


def test_openvino_refuses_a_cache_that_is_no_folder(tmp_path: Path) -> None:
    assert OpenVinoBackend(cache_folder=tmp_path).cache_folder == str(tmp_path)
    (tmp_path / "file").write_text("")
    for value, reason in ((tmp_path / "file", "is a file"), ("", "must be a path"), (3, "got 3")):
        with pytest.raises(ValueError, match=reason):
            OpenVinoBackend(cache_folder=value)


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_cache_changes_no_result(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of ``cache_folder`` are compiled models: what cannot be read is compiled again."""

    def trained(folder: Path | None) -> dict[str, bytes]:
        backend = {"name": "openvino"} | ({} if folder is None else {"cache_folder": str(folder)})
        trainer = make(models.mlp((3, 4, 1)), backend=backend, epochs=1, batch_size=4)
        trainer.fit(*regression(rows=12, features=3))
        return {name: array.tobytes() for name, array in trainer.get_state().items()}

    wanted = trained(tmp_path)
    assert wanted == trained(None)
    damage(tmp_path, way)
    monkeypatch.setattr(session, "_cache", OrderedDict())  # as in another process
    assert trained(tmp_path) == wanted


def test_each_size_of_batches_has_a_graph_under_one_name() -> None:
    """The graph of a full batch is called ``step``, before and after it has run."""
    x, y = regression(rows=8)
    trainer = make(models.linear(), backend="openvino", batch_size=4)
    trainer.step((x[:4], y[:4]))
    programs = trainer.engine.programs()
    assert "step" in programs
    trainer.step((x[:3], y[:3]))
    later = trainer.engine.programs()
    new = later.keys() - programs.keys()
    assert [name for name in later if name.startswith("step")] == ["step", "step-3-rows"]
    assert new >= {"step-3-rows"}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_predictions_and_metrics_of_an_engine_are_those_of_its_weights(accumulate: int) -> None:
    """Each of both engines: the one that has the state inside, and the one that adds gradients."""
    x, y = regression(rows=12)
    made = {}
    for backend in ("openvino", "fused"):
        options = {"batch_size": 4, "epochs": 2, "metrics": ["mae"], "accumulate": accumulate}
        trainer = make(models.linear(), backend=backend, **options)
        history = trainer.fit(x, y, validation_data=(x, y))
        batch = Batch({"X": x}, None, len(x), [])
        predicted = trainer.engine.predict(batch, ["Y"])["Y"]
        np.testing.assert_array_equal(predicted, trainer.predict(x))
        made[backend] = predicted, history["validation_mae"]
    for ours, wanted in zip(*made.values(), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)


CASES = every_case(3)
# An eighth of the cases runs always, all of them where slow tests run.
SAMPLE = int(os.environ.get("ORTFLEX_TEST_SAMPLE", "1")) * 8
OPSET = 17


def computed(case: Case) -> tuple[Any, Any] | None:
    """What onnxruntime and OpenVINO compute; None if it is refused."""
    opset = min(max(OPSET, case.since), case.until)
    arrays = {n: a.astype("f") if a.dtype.kind == "f" else a for n, a in case.arrays.items()}
    trace, inputs, y = traced(case.formula, arrays, opset, "sizes", case.sized)
    value = run(build(trace, {"value": y}, name="forward"), arrays)["value"]
    seed = np.random.default_rng(0).standard_normal(value.shape).astype(np.float32)
    cotangent = trace.input("seed", seed.dtype, declared(seed, "sizes"))
    floats = [t for n, t in inputs.items() if arrays[n].dtype.kind == "f"]
    found = gradients([(y, cotangent)], floats, RULES)
    outputs = {f"gradient {k}": t for k, t in enumerate(found)} | {"value": y}
    program = build(trace, outputs, name="gradient")
    feeds = {s.name: {**arrays, "seed": seed}[s.name] for s in program.inputs}
    try:
        shapes = {k: feeds[s.name].shape for k, s in program.takes.items()}
        made = compile_program(program, shapes, threads=1, hints=Hints(), stateful=False)
    except Unsupported:
        return None
    request = made.request()
    for port in made.model.inputs:
        if set(port.names) & set(made.matrices):
            continue  # a constant that the request has
        (name,) = set(port.names) & set(feeds)
        request.set_tensor(name, openvino.Tensor(np.array(feeds[name], order="C")))
    request.infer()
    got = {s.name: np.array(request.get_tensor(s.name).data) for s in program.outputs}
    return run(program, feeds), got


def check(case: Case) -> bool:
    both = computed(case)
    if both is None:
        return False
    for name, wanted in both[0].items():
        finite = np.abs(wanted[np.isfinite(wanted)])
        scale = max(1.0, float(finite.max(initial=0)))
        np.testing.assert_allclose(
            both[1][name], wanted, rtol=2e-3, atol=2e-3 * scale, err_msg=f"{case.name}: {name}"
        )
    return True


@pytest.mark.once
def test_openvino_computes_gradients_as_onnxruntime_or_refuses() -> None:
    own = [c for c in CASES if zlib.crc32(c.name.encode()) % SAMPLE == 0 and c.since <= 22]
    assert sum(map(check, own)) >= len(own) // 2


@pytest.mark.once
@pytest.mark.slow
def test_openvino_computes_every_gradient_as_onnxruntime_or_refuses() -> None:
    right, wrong = 0, []
    for case in CASES:
        if case.since <= 22:
            try:
                right += check(case)
            except AssertionError as error:
                wrong.append(str(error).strip()[:300])
    assert not wrong, "\n".join(wrong)
    assert right >= 330
