"""``ortflex quantize``: a table, a small file, a run folder; nothing overwritten."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from ortflex_core import require_runtime
from ortflex_plugins.cli.quantize import default_epochs
from tests import models
from tests.plugins.commands import refused, works

pytestmark = pytest.mark.per_python
DRAW = np.random.default_rng(0)
X = DRAW.standard_normal((120, 5)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(models.mlp((5, 16, 3)), "model.onnx")
    opened = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    y = opened.run(None, {opened.get_inputs()[0].name: X})[0]
    np.savez("data.npz", X=X, y=y)
    np.savez("rows.npz", X=X)
    np.savez("nothing.npz", X=X[:0], y=y[:0])
    np.savez("double.npz", X=X.astype(np.float64), y=y)
    name = opened.get_inputs()[0].name
    np.savez("more.npz", **{name: X, "spare": np.arange(len(X))})
    return tmp_path


def numbers(text: str, row: str) -> list[float]:
    (line,) = re.findall(rf"^{row} +(.*)$", text, re.MULTILINE)
    return [float(n.replace(",", "")) for n in line.split()]


@pytest.mark.parametrize("data", ["data.npz", "rows.npz"])
def test_the_trained_file_is_small_and_has_the_loss_of_the_table(folder: Path, data: str) -> None:
    """Without labels, the float file is the teacher."""
    bits = "int2" if require_runtime().version_info >= (1, 20) else "int8"
    options = ["--weights", bits, "--epochs", "30", "--learning-rate", "0.01", "--batch-size", "8"]
    result = works("quantize", "model.onnx", "--data", data, *options, "-o", "small.onnx")
    calibrated, trained = (numbers(result.output, row) for row in ("calibrated", "trained"))
    assert trained[0] < 0.5 * calibrated[0] or bits == "int8"
    assert trained[1] == calibrated[1]
    run = next((folder / "runs").iterdir())
    assert onnx.load(run / "trained.onnx").graph == onnx.load(folder / "small.onnx").graph
    works("report", str(run))
    again = works("evaluate", str(run))
    (loss,) = re.findall(r"^loss (\S+)$", again.output, re.MULTILINE)
    np.testing.assert_allclose(float(loss), trained[0], rtol=1e-4)


def test_labels_may_be_the_class_names_of_the_file(folder: Path) -> None:
    names = np.array(["sun", "rain", "snow"])
    with np.load("data.npz") as arrays:
        np.savez("named.npz", X=X, y=names[arrays["y"].argmax(axis=1)])
    call = ("quantize", "model.onnx", "--data", "named.npz", "--no-training")
    assert "model.onnx does not define their order" in refused(*call).output
    model = onnx.load("model.onnx")
    onnx.helper.set_model_props(model, {"ortflex.classes": json.dumps(names.tolist())})
    onnx.save(model, "model.onnx")
    result = works(*call)
    assert numbers(result.output, "float")[1] == 1  # the accuracy of a model by its own labels


@pytest.mark.parametrize("data", ["data.npz", "double.npz", "more.npz"])
def test_a_calibration_alone_writes_no_run(folder: Path, data: str) -> None:
    """Also where the data have another type than the model, or columns that it does not read."""
    result = works("quantize", "model.onnx", "--data", data, "--no-training")
    assert numbers(result.output, "float")[-1] > 0  # the time of a prediction
    assert not (folder / "runs").exists()
    kinds = {t.data_type for t in onnx.load(folder / "model-int8.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in kinds


def test_scales_of_activations_follow_the_batches(folder: Path) -> None:
    options = ["--observe", "1", "--epochs", "2", "-o", "small.onnx"]
    works("quantize", "model.onnx", "--data", "data.npz", *options)
    run = next((folder / "runs").iterdir())
    assert any("observe = 1" in path.read_text() for path in run.glob("*.toml"))
    refused("quantize", "model.onnx", "--data", "data.npz", "--activations", "none", *options)


def test_bad_input_overwrites_nothing(folder: Path) -> None:
    (folder / "there.onnx").write_bytes(b"mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
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
        result = refused(*arguments)
        assert text in result.output, (arguments, result.output)
        assert "Traceback" not in result.output
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_few_rows_are_passed_more_often() -> None:
    """20 to 60 epochs, so that there are 3,000 steps where 60 epochs have as many."""
    counts = {None: 20, 0: 20, 1: 60, 1500: 60, 3200: 30, 10**6: 20}
    assert {rows: default_epochs(rows, 32) for rows in counts} == counts


def test_a_file_of_one_batch_size_and_of_two_outputs_is_quantized(folder: Path) -> None:
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
