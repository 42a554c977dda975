"""A portable step: runners in Python and C++, ONNX's TrainingInfoProto, files that do not fit together."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper

from ortflex_core import CheckpointError, ConfigError, OutputError, apply_state, open_step
from tests import models
from tests.core.test_statistics import COPIES, LAYERS, network
from tests.end_to_end.portable_cases import (
    RUNNER,
    batches,
    columns,
    compare_state,
    compile_for,
    fused,
    runner,
)
from tests.plugins.commands import prepare, refused, works
from tests.training import regression

X, Y = regression(96, 6)


def test_a_state_from_the_middle_of_a_training_continues_at_its_step(tmp_path: Path) -> None:
    given = batches(X, Y, None, 16)
    trainer = fused(models.mlp(), optimizer="adam")
    for batch in given:
        trainer.step(batch)
    trainer.export_step(tmp_path / "step", rows=16)
    step = runner().Step(tmp_path / "step")
    assert step.state["step"] == len(given)
    for batch in given:
        assert step.run([{"data": batch[0], "label": batch[1]}]) == trainer.step(batch)
    compare_state(trainer, step)


def test_the_rate_and_hyperparameters_are_optional_inputs(tmp_path: Path) -> None:
    given = fused(models.mlp(), optimizer={"name": "adam", "beta1": 0.5}, learning_rate=0.02)
    given.export_step(tmp_path / "one", X, Y)
    other = fused(models.mlp(), optimizer="adam", learning_rate=1.0)
    other.export_step(tmp_path / "two", X, Y)
    items = open_step(tmp_path / "one").manifest.step
    defaults = {i.name: i.default for i in items if i.default is not None}
    assert defaults["learning_rate"] == 0.02
    assert defaults["optimizer.beta1"] == 0.5
    one, two = runner().Step(tmp_path / "one"), runner().Step(tmp_path / "two")
    for _ in range(3):
        one.run([{"data": X, "label": Y}])
        two.run([{"data": X, "label": Y}], **defaults)
    for name, array in one.state.items():
        np.testing.assert_array_equal(array, two.state[name])


@pytest.mark.parametrize("count", [1, 3])
def test_rate_and_hyperparameters_without_defaults_are_given_by_the_runner(
    tmp_path: Path, count: int
) -> None:
    trainer = fused(models.mlp(), optimizer="adam", averaging="ema", learning_rate=0.02)
    costs = []
    for name, optional in (("one", True), ("two", False)):
        options = {"optional_inputs": optional, "steps_per_run": count}
        trainer.export_step(tmp_path / name, X[:8], Y[:8], rows=8, **options)
        parts = [{"data": X[k : k + 8], "label": Y[k : k + 8]} for k in range(0, 8 * count, 8)]
        costs.append(runner().Step(tmp_path / name).run(parts))
    np.testing.assert_array_equal(*costs)
    graph = onnx.load(tmp_path / "two" / "step.onnx").graph
    assert not {i.name for i in graph.input} & {t.name for t in graph.initializer}
    items = open_step(tmp_path / "two").manifest.step
    assert next(i.default for i in items if i.role == "rate") == (
        0.02 if count == 1 else (0.02,) * count
    )


def test_the_runner_trains_as_a_program(tmp_path: Path) -> None:
    x, y = regression(96, 5)
    trainer = fused(models.linear(), learning_rate=0.05)
    trainer.export_step(tmp_path / "step", x, y, rows=32)
    np.save(tmp_path / "X.npy", x)
    np.save(tmp_path / "y.npy", y)
    command = [sys.executable, RUNNER, tmp_path / "step", tmp_path / "X.npy", tmp_path / "y.npy"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    for batch in 2 * batches(x, y, None, 32):
        trainer.step(batch)
    state = open_step(tmp_path / "step").state
    assert int(state.arrays["step"]) == 6
    for name, array in trainer.get_state().items():
        np.testing.assert_array_equal(state.arrays[name], array)


def test_the_runner_has_about_forty_lines() -> None:
    assert len([line for line in RUNNER.read_text().splitlines() if line.strip()]) <= 42


RECIPE = 'model = "model.onnx"\ndata = "data.npz"\nloss = "squared_error"\noptimizer = "adam"\n'


def test_the_commands_write_a_step_and_bring_its_state_back(tmp_path: Path) -> None:
    folder = prepare(tmp_path, f'{RECIPE}schedule = "cosine"\nmetrics = ["rmse"]\n')
    done = works("export-step", str(folder / "train.toml"), "-o", str(folder / "step"), "epochs=3")
    assert "not in the step: metric rmse" in done.output
    assert "schedule cosine: 6 rates for 6 steps" in done.output
    x, y = regression()
    step = runner().Step(folder / "step")
    step.run([{"data": x, "label": y}])
    step.save()
    target = folder / "trained.onnx"
    state = folder / "step" / "state.safetensors"
    works("apply-state", str(folder / "model.onnx"), str(state), "-o", str(target))
    before, after = models.weights_of(onnx.load(folder / "model.onnx")), step.state
    for name, array in models.weights_of(onnx.load(target)).items():
        np.testing.assert_array_equal(array, after[name])
        assert not np.array_equal(array, before[name])
    done = refused("apply-state", str(folder / "train.toml"), str(state), "-o", str(target))
    assert "is a recipe" in done.output


# ---------------------------------------------------------------------- what does not fit


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("portable") / "step"
    fused(models.mlp(), optimizer="adam").export_step(folder, X, Y, rows=8)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def item(table: Any, name: str) -> Any:
    return next(i for i in table["step"] if i["in"] == name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: item(t, "m/W1").update({"in": "m/W"}),
            "'m/W' is not in the graph; did you mean 'm/W",
        ),
        (
            lambda t: item(t, "W2").update(shape=[1, 2]),
            r"'W2' is float32\[1, 2\], in .* float32\[8, 4\]",
        ),
        (
            lambda t: item(t, "X").update(dtype="float64"),
            r"'X' is float64\[8, 6\], in .* float32\[8, 6\]",
        ),
        (lambda t: t["step"].remove(item(t, "b1")), "it lacks the input 'b1' of the graph"),
        (lambda t: t.pop("rows"), "manifest.json' is broken: .*rows"),
        (lambda t: t.update(format=7), "has the format 7, but this version reads format 1"),
        (lambda t: t.update(model="0" * 64), "belongs to a different model than the manifest"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    tmp_path: Path, exported: dict[str, bytes], change: Callable[[Any], None], message: str
) -> None:
    table = json.loads(exported["manifest.json"])
    change(table)
    folder = write(tmp_path / "step", exported | {"manifest.json": json.dumps(table).encode()})
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match=message):
        apply_state(tmp_path / "model.onnx", folder, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(
    "name", ["manifest.json", "step.onnx", "predict.onnx", "state.safetensors"]
)
@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_missing_and_damaged_files_are_named(
    tmp_path: Path, exported: dict[str, bytes], name: str, damage: str
) -> None:
    files = dict(exported)
    content = files.pop(name)
    if damage != "missing":
        files[name] = content[: len(content) // 2] if damage == "cut" else b"[1]"
    folder = write(tmp_path / "step", files)
    with pytest.raises(CheckpointError, match=name):
        open_step(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (models.linear(6), "has no tensor 'W1'; "),
        (models.mlp((6, 9, 4, 1)), r"'W1' is float32\[6, 8\], in .* it is float32\[6, 9\]"),
        (models.mlp(activation="Relu"), "the graphs differ"),
    ],
)
def test_a_state_of_another_model_is_refused(
    tmp_path: Path, exported: dict[str, bytes], model: Any, message: str
) -> None:
    folder = write(tmp_path / "step", exported)
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "out.onnx").write_bytes(b"as before")
    for state in (folder, folder / "state.safetensors"):
        with pytest.raises(CheckpointError, match=message):
            apply_state(tmp_path / "model.onnx", state, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == b"as before"
    if "graphs" in message:
        apply_state(tmp_path / "model.onnx", folder, tmp_path / "out.onnx", strict=False)
        onnx.checker.check_model(tmp_path / "out.onnx")


def test_a_state_whose_header_was_lost_is_refused(
    tmp_path: Path, exported: dict[str, bytes]
) -> None:
    from safetensors.numpy import load, save

    bare = save(load(exported["state.safetensors"]))
    folder = write(tmp_path / "step", exported | {"state.safetensors": bare})
    with pytest.raises(CheckpointError, match="does not describe its tensors"):
        apply_state(models.mlp(), folder / "state.safetensors")


@pytest.mark.parametrize("value", [0, 2.5, True])
@pytest.mark.parametrize("name", ["rows", "steps_per_run", "epochs", "steps_per_epoch"])
def test_wrong_numbers_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected an integer >= 1"):
        fused(models.mlp()).export_step(tmp_path / "step", X, Y, **{name: value})
    assert not (tmp_path / "step").exists()


def test_a_step_needs_the_types_of_labels(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"export_step\(folder, X, y\)"):
        fused(models.mlp()).export_step(tmp_path / "step")


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    trainer = fused(models.mlp())
    trainer.export_step(folder, X, Y)
    trainer.step((X, Y))
    trainer.export_step(folder)
    assert int(open_step(folder).state.arrays["step"]) == 1
    (folder / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OutputError, match=r"holds 'notes\.txt', which is not part of a portable"):
        trainer.export_step(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


# ONNX's TrainingInfoProto, run as the standard says -----------------------------------------------


def combined(model: ModelProto) -> ModelProto:
    """The training graph by the standard: the lists of the model and of the algorithm, joined."""
    out = ModelProto()
    out.CopyFrom(model)
    del out.training_info[:]
    (info,) = model.training_info
    for field in ("input", "output", "initializer", "node", "value_info"):
        getattr(out.graph, field).extend(getattr(info.algorithm, field))
    known = {v.name for v in out.graph.input}
    # To replace their values at every run, the variables are inputs with defaults.
    for tensor in out.graph.initializer:
        if tensor.name in {b.key for b in info.update_binding} - known:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            out.graph.input.append(value)
    return out


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (models.mlp(), {"optimizer": "adam", "penalty": "l2", "averaging": "ema"}),
    "frozen": (models.mlp((3, 700, 1)), {"params": ["!W1"], "optimizer": "momentum"}),
    "accumulation": (models.mlp((3, 4, 1)), {"accumulate": 2}),
    "statistics": (
        network(COPIES + LAYERS.replace("y = MatMul (n2", "d = Dropout (n2)\n y = MatMul (d")),
        {"batch_norm": "train", "dropout": 0.3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_standard_training_graph_makes_the_same_steps(tmp_path: Path, name: str) -> None:
    model, options = CASES[name]
    features = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    x, y = regression(48, features)
    given = batches(x, y, None, 8)
    trainer = fused(model, **options)
    compile_for(trainer, given[0], fixed=True)
    trainer.export_step(tmp_path / "step", rows=8)
    path = tmp_path / "step" / "training_info.onnx"
    onnx.checker.check_model(path, full_check=True)
    stored = onnx.load(path)
    session = ort.InferenceSession(path)
    feed = {session.get_inputs()[0].name: x}
    assert [i.name for i in session.get_inputs()] == [model.graph.input[0].name]
    predicted = session.run(None, feed)[0]
    np.testing.assert_allclose(predicted, trainer.predict(x), rtol=1e-4, atol=1e-6)

    whole = combined(stored)
    onnx.checker.check_model(whole, full_check=True)
    training = ort.InferenceSession(whole.SerializeToString())
    (info,) = stored.training_info
    tensors = (*stored.graph.initializer, *info.algorithm.initializer)
    keys = {binding.key: binding.value for binding in info.update_binding}
    assert len(keys) == len(info.update_binding)
    variables = {t.name: numpy_helper.to_array(t) for t in tensors if t.name in keys}
    assert variables.keys() == keys.keys()

    step = runner().Step(tmp_path / "step")
    count = step.manifest["batches_per_run"]
    places = {
        i["of"] + (f"@0.{i['batch']}" if i["batch"] else ""): i
        for i in step.manifest["step"]
        if i["batch"] is not None
    }
    for k in range(0, len(given) - count + 1, count):
        parts = [columns(batch) for batch in given[k : k + count]]
        cost = step.run(parts)
        feeds = {n: parts[i["batch"]][i["role"]] for n, i in places.items()}
        results = training.run([*keys.values(), "loss"], {**variables, **feeds})
        variables = dict(zip(keys, results, strict=False))
        if "penalty" not in options:
            np.testing.assert_allclose(results[-1], cost, rtol=1e-6)
    assert len(variables) == len(step.state)
    for item in step.moving:
        np.testing.assert_allclose(
            variables[item["in"]], step.state[item["in"]], rtol=1e-5, atol=1e-6
        )


# C++: the sketch of the how-to page ---------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "howto" / "train-outside-python.md"
# ORTFLEX_ONNXRUNTIME is a folder with include/onnxruntime_cxx_api.h and lib/libonnxruntime.so, as in the
# archives of onnxruntime's releases.
PROGRAM = """
#include <onnxruntime_cxx_api.h>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

struct Batch { std::vector<float> x, y; };

int main() {
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR);
  auto cpu = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  Ort::AllocatorWithDefaultOptions memory;
  std::vector<std::string> old_names, new_names;
  std::vector<Ort::Value> start;
  std::ifstream plan("plan.txt");
  std::string line;
  while (std::getline(plan, line)) {
    std::istringstream words(line);
    std::string name, next, type;
    size_t rank, count = 1;
    double value;
    words >> name >> next >> type >> rank;
    std::vector<int64_t> shape(rank);
    for (auto& size : shape) { words >> size; count *= size; }
    bool whole = type == "int64";
    start.push_back(whole ? Ort::Value::CreateTensor<int64_t>(memory, shape.data(), rank)
                          : Ort::Value::CreateTensor<float>(memory, shape.data(), rank));
    for (size_t k = 0; k < count; k++) {
      words >> value;
      if (whole) start.back().GetTensorMutableData<int64_t>()[k] = static_cast<int64_t>(value);
      else start.back().GetTensorMutableData<float>()[k] = static_cast<float>(value);
    }
    old_names.push_back(name);
    new_names.push_back(next);
  }
  std::vector<Batch> batches;
  std::ifstream rows("rows.bin", std::ios::binary);
  for (int k = 0; k < 8; k++) {
    Batch batch{std::vector<float>(40), std::vector<float>(8)};
    rows.read(reinterpret_cast<char*>(batch.x.data()), 160);
    rows.read(reinterpret_cast<char*>(batch.y.data()), 32);
    batches.push_back(batch);
  }
  int64_t x_shape[] = {8, 5}, y_shape[] = {8, 1};
  SKETCH
}
"""
FILLED = """
inputs = {"X", "label"};
for (auto& name : old_names) inputs.push_back(name.c_str());
for (auto& name : new_names) outputs.push_back(name.c_str());
outputs.push_back("loss");
state = std::move(start);
"""


def test_the_sketch_compiles_and_makes_the_same_steps(tmp_path: Path) -> None:
    place = os.environ.get("ORTFLEX_ONNXRUNTIME")
    if shutil.which("g++") is None or place is None:
        pytest.skip("g++, or onnxruntime's headers and library (ORTFLEX_ONNXRUNTIME), are missing")
    x, y = regression(64, 5)
    trainer = fused(models.mlp((5, 8, 1)), optimizer="adam", learning_rate=0.01)
    trainer.export_step(tmp_path / "step", x, y, rows=8)
    step = runner().Step(tmp_path / "step")
    lines = []
    for item in step.moving:
        array = step.state[item["in"]]
        words = [item["in"], item["out"], array.dtype.name, array.ndim, *array.shape]
        lines.append(" ".join(map(str, [*words, *(repr(float(v)) for v in array.ravel())])))
    (tmp_path / "plan.txt").write_text("\n".join(lines) + "\n")
    parts = [(x[k : k + 8], y[k : k + 8]) for k in range(0, 64, 8)]
    (tmp_path / "rows.bin").write_bytes(b"".join(a.tobytes() for part in parts for a in part))
    found = re.search(r"```cpp\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    declared, _, loop = found[1].partition("for (auto& batch : batches)")
    sketch = f"{declared}{FILLED}for (auto& batch : batches){loop}"
    (tmp_path / "main.cpp").write_text(PROGRAM.replace("SKETCH", sketch), encoding="utf-8")
    library = Path(place, "lib", "libonnxruntime.so")
    command = ["g++", "-std=c++17", f"-I{Path(place, 'include')}", "main.cpp", str(library)]
    command += [f"-Wl,-rpath,{library.parent}", "-o", "train"]
    subprocess.run(command, cwd=tmp_path, check=True)
    out = subprocess.run(["./train"], cwd=tmp_path, check=True, capture_output=True, text=True)
    wanted = [step.run([{"data": a, "label": b}]) for a, b in parts]
    np.testing.assert_allclose([float(v) for v in out.stdout.split()], wanted, rtol=1e-5)
