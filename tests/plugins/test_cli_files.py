"""Commands that write one file: ``export``, ``quantize``, ``find-rate``, ``diff``; none is overwritten."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from ortflex_core import Recipe, Trainer, require_runtime
from ortflex_plugins.cli.quantize import default_epochs
from tests import models
from tests.plugins.commands import content, interrupted, ortflex, prepare, refused, works
from tests.training import regression

pytestmark = pytest.mark.per_python

RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 4
learning_rate = 0.05
batch_size = 8
validation = 0.25
callbacks = ["checkpoint"]
output = "run"
"""
KINDS = {
    "weights": "",
    "averages": 'averaging = "ema"\n',
    "an adapter": 'adapters = {name = "lora", rank = 2}\n',
    "integers": 'quantize = "int8"\n',
    "a new last layer": 'head = 3\nloss = "softmax_cross_entropy"\n',
    "a batch that the file fixes": "free_batch = true\n",
}
X, _ = regression()


def trained(folder: Path, more: str = "") -> None:
    """A finished run in ``run``; keys in ``more`` replace those of the recipe."""
    keys = {line.partition(" =")[0] for line in more.splitlines()}
    kept = [line for line in RECIPE.splitlines() if line.partition(" =")[0] not in keys]
    prepare(folder, "\n".join(kept) + "\n" + more)
    if "head" in keys:
        np.savez(folder / "data.npz", X=X, y=(X[:, 0] > 0).astype(np.int64))
    if "free_batch" in keys:
        model = onnx.load(folder / "model.onnx")
        for value in (model.graph.input[0], model.graph.output[0]):
            value.type.tensor_type.shape.dim[0].dim_value = 5
        onnx.save(model, folder / "model.onnx")
    works("train", "train.toml")


def same(path: str | Path, other: str | Path) -> bool:
    """Whether two files have the same nodes, inputs, outputs and numbers; metadata may differ."""
    first, second = (onnx.load(p).graph for p in (path, other))
    numbers = [
        {t.name: onnx.numpy_helper.to_array(t).tolist() for t in graph.initializer}
        for graph in (first, second)
    ]
    parts = [[*graph.node, *graph.input, *graph.output] for graph in (first, second)]
    return parts[0] == parts[1] and numbers[0] == numbers[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_and_its_newest_checkpoint_are_the_trained_file(
    folder: Path, kind: str
) -> None:
    trained(folder, KINDS[kind])
    works("export", "run", "-o", "a.onnx")
    assert Path("a.onnx").read_bytes() == Path("run/trained.onnx").read_bytes()
    for source in (["run", "--checkpoint", "newest"], ["run/checkpoints"]):
        works("export", *source, "-o", "b.onnx", "--force")
        assert same("b.onnx", "run/trained.onnx")
    works("verify", "b.onnx")


def test_the_best_checkpoint_is_another_one(folder: Path) -> None:
    """The validation loss rises with this rate, so the first epoch is the best one."""
    trained(folder, "learning_rate = 0.6\n")
    works("export", "run", "--checkpoint", "best", "-o", "best.onnx")
    assert not same("best.onnx", "run/trained.onnx")
    resumed = Trainer.resume("run/checkpoints/best", callbacks=()).get_state()
    for name, array in resumed.items():
        np.testing.assert_array_equal(models.weights_of(onnx.load("best.onnx"))[name], array)
    works("export", "run/checkpoints/best", "-o", "c.onnx")
    assert same("best.onnx", "c.onnx")


def test_a_run_that_did_not_end_has_the_weights_of_its_newest_checkpoint(folder: Path) -> None:
    """As a kill leaves it: without trained.onnx."""
    prepare(folder, RECIPE)
    assert interrupted("train", "train.toml").exit_code == 130
    Path("run/trained.onnx").unlink()
    assert "checkpoints" in works("export", "run", "-o", "a.onnx").output
    newest = Trainer.resume("run/checkpoints", callbacks=()).get_state()
    np.testing.assert_array_equal(models.weights_of(onnx.load("a.onnx"))["coef"], newest["coef"])


def test_an_existing_file_is_overwritten_with_force_only(folder: Path) -> None:
    trained(folder)
    Path("a.onnx").write_text("mine")
    for source in ("run", "run/checkpoints"):
        assert "--force" in refused("export", source, "-o", "a.onnx").stderr
        assert Path("a.onnx").read_text() == "mine"
    works("export", "run", "-o", "a.onnx", "--force")
    assert same("a.onnx", "run/trained.onnx")


DAMAGE = {
    "a cut state": ("run/checkpoints/best/state.safetensors", lambda b: b[: len(b) // 2]),
    "another bit": (
        "run/checkpoints/best/state.safetensors",
        lambda b: b[:-3] + bytes([b[-3] ^ 8]) + b[-2:],
    ),
    "no record": ("run/checkpoints/best/checkpoint.json", lambda b: b"{}"),
    "a cut model": ("run/trained.onnx", lambda b: b[:40]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_an_error_and_writes_nothing(folder: Path, case: str) -> None:
    trained(folder)
    path, change = DAMAGE[case]
    Path(path).write_bytes(change(Path(path).read_bytes()))
    source = "run" if "trained" in path else "run/checkpoints/best"
    assert refused("export", source, "-o", "a.onnx").stderr.startswith("error: ")
    assert not Path("a.onnx").exists()


def test_what_is_no_run_has_the_next_step(folder: Path) -> None:
    trained(folder)
    shutil.copytree("run", "runs/first")
    (folder / "empty").mkdir()
    (folder / "state.safetensors").write_bytes(b"")
    for source, text in {
        "train.toml": "ortflex train train.toml",
        "model.onnx": "is a model already",
        "state.safetensors": "ortflex apply-state",
        "rnu": "did you mean 'run'?",
        "runs": f"runs in it: {Path('runs', 'first')}",
        "empty": "neither trained.onnx nor a checkpoint",
        "data.npz": "pass a run folder, or a checkpoint",
    }.items():
        result = refused("export", source, "-o", "a.onnx")
        assert text in result.stderr, result.stderr
    shutil.rmtree("run/checkpoints")
    result = ortflex("export", "run", "--checkpoint", "best", "-o", "a.onnx")
    assert "no best checkpoint" in result.stderr
    assert not Path("a.onnx").exists()


def test_inference_mode(folder: Path) -> None:
    """Dropout of a file in training mode is off in the export."""
    trained(folder)
    nodes = "D = Dropout(X, ratio, on) Y = MatMul(D, coef)"
    weights = {"coef": np.ones((5, 1)), "ratio": np.float32(0.5), "on": np.array(True)}
    model = models.parsed(nodes, weights, "float[N, 5] X", "float[N, 1] Y")
    onnx.save(model, "model.onnx")
    works("train", "train.toml", "output=other")
    for source in (["other"], ["other", "--checkpoint", "newest"]):
        works("export", *source, "--inference", "-o", "a.onnx", "--force")
        exported = onnx.load("a.onnx")
        drops = "Dropout" in [node.op_type for node in exported.graph.node]
        assert not (drops and models.weights_of(exported).get("on", np.array(False)).any())


# ---------------------------------------------------------------------- quantize


ROWS = np.random.default_rng(0).standard_normal((120, 5)).astype(np.float32)


@pytest.fixture
def network(folder: Path) -> Path:
    """The current folder, with a float model and data of several kinds."""
    onnx.save(models.mlp((5, 16, 3)), "model.onnx")
    y = models.predict(models.mlp((5, 16, 3)), {"X": ROWS})["Y"]
    np.savez("data.npz", X=ROWS, y=y)
    np.savez("rows.npz", X=ROWS)
    np.savez("nothing.npz", X=ROWS[:0], y=y[:0])
    np.savez("double.npz", X=ROWS.astype(np.float64), y=y)
    np.savez("more.npz", X=ROWS, spare=np.arange(len(ROWS)))
    return folder


def numbers(text: str, row: str) -> list[float]:
    (line,) = re.findall(rf"^{row} +(.*)$", text, re.MULTILINE)
    return [float(n.replace(",", "")) for n in line.split()]


@pytest.mark.parametrize("data", ["data.npz", "rows.npz"])
def test_the_trained_file_is_small_and_has_the_loss_of_the_table(network: Path, data: str) -> None:
    """Without labels, the float file is the teacher."""
    bits = "int2" if require_runtime().version_info >= (1, 20) else "int8"
    options = ["--weights", bits, "--epochs", "30", "--learning-rate", "0.01", "--batch-size", "8"]
    result = works("quantize", "model.onnx", "--data", data, *options, "-o", "small.onnx")
    calibrated, trained = (numbers(result.output, row) for row in ("calibrated", "trained"))
    assert trained[0] < 0.5 * calibrated[0] or bits == "int8"
    assert trained[1] == calibrated[1]
    run = next((network / "runs").iterdir())
    assert onnx.load(run / "trained.onnx").graph == onnx.load(network / "small.onnx").graph
    works("report", str(run))
    again = works("evaluate", str(run))
    (loss,) = re.findall(r"^loss (\S+)$", again.output, re.MULTILINE)
    np.testing.assert_allclose(float(loss), trained[0], rtol=1e-4)


def test_labels_may_be_the_class_names_of_the_file(network: Path) -> None:
    names = np.array(["sun", "rain", "snow"])
    with np.load("data.npz") as arrays:
        np.savez("named.npz", X=ROWS, y=names[arrays["y"].argmax(axis=1)])
    call = ("quantize", "model.onnx", "--data", "named.npz", "--no-training")
    assert "model.onnx does not define their order" in refused(*call).output
    model = onnx.load("model.onnx")
    onnx.helper.set_model_props(model, {"ortflex.classes": json.dumps(names.tolist())})
    onnx.save(model, "model.onnx")
    result = works(*call)
    assert numbers(result.output, "float")[1] == 1  # the accuracy of a model by its own labels


@pytest.mark.parametrize("data", ["data.npz", "double.npz", "more.npz"])
def test_a_calibration_alone_writes_no_run(network: Path, data: str) -> None:
    """Also where the data have another type than the model, or columns that it does not read."""
    result = works("quantize", "model.onnx", "--data", data, "--no-training")
    assert numbers(result.output, "float")[-1] > 0  # the time of a prediction
    assert not (network / "runs").exists()
    kinds = {t.data_type for t in onnx.load(network / "model-int8.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in kinds


def test_scales_of_activations_follow_the_batches(network: Path) -> None:
    options = ["--observe", "1", "--epochs", "2", "-o", "small.onnx"]
    works("quantize", "model.onnx", "--data", "data.npz", *options)
    run = next((network / "runs").iterdir())
    assert any("observe = 1" in path.read_text() for path in run.glob("*.toml"))
    refused("quantize", "model.onnx", "--data", "data.npz", "--activations", "none", *options)


def test_bad_input_overwrites_nothing(network: Path) -> None:
    (network / "there.onnx").write_bytes(b"mine")
    before = content(network)
    good = ("quantize", "model.onnx", "--data", "data.npz")
    for arguments, text in (
        ([*good, "-o", "there.onnx"], "--force"),
        ([*good, "-o", "model.onnx", "--force"], "float model"),
        ([*good, "-o", "small.tflite"], ".onnx"),
        ([*good, "-o", "absent/small.onnx"], "the folder 'absent' does not exist"),
        ([*good, "--skip", "nowhere", "-o", "s.onnx"], "skip"),
        ([*good, "--method", "mes", "-o", "s.onnx"], "mse"),
        (["quantize", "model.onnx", "--data", "rows.npz", "--loss", "huber"], "no labels"),
        (["quantize", "model.onnx", "--data", "nothing.npz"], "row"),
        (["quantize", "absent.onnx", "--data", "data.npz"], "does not exist"),
    ):
        assert text in refused(*arguments).output, arguments
    assert before == content(network)


def test_few_rows_are_passed_more_often() -> None:
    """20 to 60 epochs, so that there are 3,000 steps where 60 epochs have as many."""
    counts = {None: 20, 0: 20, 1: 60, 1500: 60, 3200: 30, 10**6: 20}
    assert {rows: default_epochs(rows, 32) for rows in counts} == counts


def test_a_file_of_one_batch_size_and_of_two_outputs_is_quantized(network: Path) -> None:
    """Every row is computed by itself, so the data may have any number; the file keeps its sizes."""
    model = onnx.load("model.onnx")
    first = model.graph.output[0]
    model.graph.node.append(onnx.helper.make_node("Softmax", [first.name], ["shares"]))
    for k, size in enumerate((4, 1)):
        model.graph.output.append(onnx.helper.make_tensor_value_info("shares", 1, ["batch", 3]))
        for value in (model.graph.input[0], *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = size
        onnx.save(model, f"fixed{k}.onnx")
        model.graph.output.pop()
        options = ["--epochs", "2", "-o", f"small{k}.onnx"]
        result = works("quantize", f"fixed{k}.onnx", "--data", "rows.npz", *options)
        assert numbers(result.output, "trained")[-1] > 0
        opened = onnxruntime.InferenceSession(f"small{k}.onnx", providers=["CPUExecutionProvider"])
        assert opened.get_inputs()[0].shape == [size, 5]


# ---------------------------------------------------------------------- find-rate

SWEPT = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
batch_size = 8
progress = false
"""


def test_the_suggestion_of_the_command_is_that_of_the_trainer(tmp_path: Path) -> None:
    recipe = str(prepare(tmp_path, SWEPT) / "train.toml")
    before = content(tmp_path)
    table = tmp_path / "rates.csv"
    result = works("find-rate", recipe, "optimizer=adam", "--steps", "200", "-o", str(table))
    loaded = Recipe.load(recipe, ["optimizer=adam"])
    with np.load(tmp_path / "data.npz") as data:
        sweep = Trainer.from_recipe(loaded).find_rate(data["X"], data["y"], steps=200)
    assert f"learning_rate={sweep.suggestion:.2g}" in result.output
    lines = re.findall(r"^ *\d\.\d\de[+-]\d\d +\S+", result.output, re.MULTILINE)
    assert len(lines) == 20
    assert len(table.read_text().splitlines()) == len(sweep) + 1
    table.unlink()
    assert before == content(tmp_path)


def test_the_suggested_command_is_complete(tmp_path: Path) -> None:
    """With the keys and options of this call; the suggestion fits no other optimizer."""
    recipe = str(prepare(tmp_path, SWEPT) / "train.toml")
    given = ["optimizer=adam", "learning_rate=3", "batch_size=10", "--trust-code"]
    result = ortflex("find-rate", recipe, *given)
    words = shlex.split(result.output.partition("suggestion: ")[2].splitlines()[0])
    assert words[:5] == ["ortflex", "train", recipe, "optimizer=adam", "batch_size=10"]
    assert words[5].startswith("learning_rate=")
    assert words[5] != "learning_rate=3"
    assert words[6:] == ["--trust-code"]


def test_pictures_and_files_that_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recipe = str(prepare(tmp_path, SWEPT) / "train.toml")
    picture = tmp_path / "rates.svg"
    assert "no suggestion" in works("find-rate", recipe, "--end", "1e-6", "-o", str(picture)).output
    assert b"<svg" in picture.read_bytes()
    for arguments, key in (
        (["-o", str(picture)], "--force"),
        (["-o", "rates.txt"], ".csv"),
        (["--steps", "1"], "steps"),
        (["--start", "-1"], "start"),
    ):
        assert key in refused("find-rate", recipe, *arguments).output


# ---------------------------------------------------------------------- diff


def file(path: Path, tensors: Any, op: str = "Add", **metadata: str) -> str:
    nodes = f"s = MatMul(x, w) y = {op}(s, b)"
    made = models.parsed(nodes, tensors, "float[n, 3] x", "float[n, 2] y")
    onnx.helper.set_model_props(made, metadata)
    onnx.save(made, path)
    return str(path)


@pytest.mark.once
def test_every_difference_is_found_and_nothing_else(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(3, 2)).astype(np.float32), np.zeros(2, np.float32)
    other = w.copy()
    other[1, 0] += 0.5
    other[2, 1] -= 2
    first = file(tmp_path / "a.onnx", {"w": w, "b": b}, author="me")
    second = file(tmp_path / "b.onnx", {"w": other, "b": b}, op="Mul", author="<you>")
    found = json.loads(works("diff", first, second, "--json").stdout)
    [change] = found["tensors"]
    delta = np.float64(other) - np.float64(w)
    assert (change["name"], change["state"], change["numbers"]) == ("w", "changed", 2)
    assert change["norm"] == pytest.approx(np.linalg.norm(np.float64(w)))
    assert change["change"] == pytest.approx(np.linalg.norm(delta))
    assert change["largest"] == pytest.approx(2)
    assert found["equal"] == 1
    assert found["facts"] == {
        "nodes Add": [1, None],
        "nodes Mul": [None, 1],
        "metadata author": ["me", "<you>"],
    }
    page = tmp_path / "page.html"
    text = works("diff", first, second, "-o", str(page)).stdout
    assert "1 of 2 tensors differ" in text
    assert "<td>w</td>" in page.read_text()
    assert "<you>" not in page.read_text()


@pytest.mark.once
def test_equal_files_and_other_forms(tmp_path: Path) -> None:
    w, b = np.full((3, 2), np.nan, np.float32), np.zeros(2, np.float32)
    first = file(tmp_path / "a.onnx", {"w": w, "b": b})
    again = json.loads(works("diff", first, first, "--json").stdout)
    assert (again["tensors"], again["facts"], again["equal"]) == ([], {}, 2)
    second = file(tmp_path / "b.onnx", {"w": w, "b": b[:1]})
    [change] = json.loads(works("diff", first, second, "--json").stdout)["tensors"]
    assert (change["name"], change["state"]) == ("b", "other form")
    assert "[2]" in change["form"]
    assert "[1]" in change["form"]
