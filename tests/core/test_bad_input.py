"""Bad input is an ortflex error that says what, where, expected and got; never a C++ traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from ortflex_core.errors import (
    ConfigError,
    DataError,
    ModelError,
    OrtflexError,
    PluginError,
    Unsupported,
)
from ortflex_core.runtime import require_runtime
from tests import models
from tests.training import every_backend, make, regression

X, Y = regression(rows=20)


# The file -----------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file '.*nowhere\.onnx'"):
        make(tmp_path / "nowhere.onnx")


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be read: .*directory"):
        make(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 20, 0.3, 0.5, 0.9, -1])
def test_a_truncated_file(tmp_path: Path, keep: float) -> None:
    whole = models.mlp().SerializeToString()
    path = tmp_path / "cut.onnx"
    path.write_bytes(whole[: int(keep * len(whole)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(ModelError, match=r"cut\.onnx"):
        make(path)
    with pytest.raises(ModelError, match="the model"):
        make(path.read_bytes())


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"not a model", b"<html></html>", bytes(range(256)) * 4]
)
def test_garbage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage.onnx"
    path.write_bytes(content)
    text = rf"garbage\.onnx.*\({len(content)} bytes\) is not an ONNX model or is truncated"
    with pytest.raises(ModelError, match=text):
        make(path)


def test_external_data_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(models.mlp(), path, save_as_external_data=True, location="w.bin", size_threshold=64)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"m\.onnx lacks its external data.*w\.bin"):
        make(path)


def broken(change: Any) -> ModelProto:
    model = models.mlp()
    change(model)
    return model


def loop_back(model: ModelProto) -> None:
    model.graph.node[0].input[0] = "h2"


def twice(model: ModelProto) -> None:
    model.graph.node[1].output[0] = model.graph.node[0].output[0]


def dangling(model: ModelProto) -> None:
    model.graph.node[2].input[0] = "nobody"


def misnamed(model: ModelProto) -> None:
    model.graph.node[2].op_type = "Tahn"


def misshapen(model: ModelProto) -> None:
    array = np.zeros((3, 8), np.float32)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, "W1"))


def too_new_for_anybody(model: ModelProto) -> None:
    model.opset_import[0].version = 999


def without_opset(model: ModelProto) -> None:
    del model.opset_import[:]


def without_nodes(model: ModelProto) -> None:
    del model.graph.node[:]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (loop_back, "is not a valid ONNX model: .*topologic"),
        (twice, r"is not a valid ONNX model: (.|\n)*m1"),
        (dangling, r"is not a valid ONNX model: (.|\n)*nobody"),
        (misnamed, "is not a valid ONNX model: .*Tahn"),
        (too_new_for_anybody, "opset|No Op registered|version"),
        (without_opset, "imports no standard operators|opset"),
        (without_nodes, "has no nodes"),
    ],
)
def test_graphs_that_are_none(change: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        make(broken(change))


@every_backend
def test_shapes_that_do_not_fit_each_other(backend: str) -> None:
    trainer = make(broken(misshapen), backend=backend)
    with pytest.raises(OrtflexError, match=r"(?i)matmul"):
        trainer.fit(*regression(rows=20, features=6))


def test_an_opset_older_than_our_rules() -> None:
    model = models.mlp()
    model.opset_import[0].version = 9
    with pytest.raises(
        ModelError, match=r"has opset 9, ortflex trains opset 13 and newer\. Conver"
    ):
        make(model)


@pytest.mark.parametrize("what", ["opset", "ir"])
def test_a_model_newer_than_the_runtime(what: str) -> None:
    runtime = require_runtime()
    model = models.mlp()
    if what == "opset":
        model.opset_import[0].version = runtime.max_opset + 1
        if runtime.max_opset + 1 > onnx.defs.onnx_opset_version():
            pytest.skip(f"onnx {onnx.__version__} knows no opset newer than {runtime}")
    else:
        model.ir_version = runtime.max_ir + 1
        if model.ir_version > onnx.IR_VERSION:
            pytest.skip(f"onnx {onnx.__version__} knows no IR newer than {runtime}")
    text = rf"the installed {runtime} reads opset {runtime.max_opset} and IR {runtime.max_ir} at mo"
    with pytest.raises(ModelError, match=text + ".*use "):
        make(model)


# Parameters ---------------------------------------------------------------------------------------


def test_a_model_without_float_parameters() -> None:
    model = models.model(
        [helper.make_node("Tanh", ["X"], ["Y"])],
        [models.floats("X", "N", 5)],
        [models.floats("Y", "N", 5)],
        {},
    )
    with pytest.raises(ModelError, match="has no float parameter to train that reaches Y"):
        make(model)


def test_weights_that_are_attributes() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    skl2onnx = pytest.importorskip("skl2onnx")
    fitted = linear_model.LinearRegression().fit(X, Y.ravel())
    model = skl2onnx.to_onnx(fitted, X[:1], target_opset=17)
    text = r"the weights of LinearRegressor are attributes.*black_op=\{'LinearRegressor'\}"
    with pytest.raises(ModelError, match=text):
        make(model)
    # What the text says does help.
    converted = skl2onnx.to_onnx(fitted, X[:1], target_opset=17, black_op={"LinearRegressor"})
    assert make(converted, epochs=1).fit(X, Y).losses[0] < 1


def test_half_precision_is_refused() -> None:
    model = models.linear()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    with pytest.raises(ModelError, match="parameter 'coef' is float16; float32 and float64 can be"):
        make(model)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (["W11"], r"unknown parameter 'W11'; did you mean 'W1'.*Known: W1, W2, W3, b1, b2, b3"),
        (["V*"], r"unknown parameter 'V\*'"),
        (["!V1"], "unknown parameter in '!V1'"),
        (["W1", "!*"], "no float parameter to train .*with params=.*Left out: W1"),
    ],
)
def test_unknown_parameters(params: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        make(models.mlp(), params=params)


# Numbers and names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("batch_size", 0, "batch_size: expected an integer >= 1, got 0"),
        ("batch_size", -3, "batch_size: expected an integer >= 1, got -3"),
        ("batch_size", 2.5, "batch_size: expected an integer >= 1, got 2.5"),
        ("batch_size", True, "batch_size: expected an integer >= 1, got True"),
        ("epochs", 0, "epochs: expected an integer >= 1, got 0"),
        ("learning_rate", 0, "learning_rate: expected a finite number > 0, got 0"),
        ("learning_rate", 0.0, "learning_rate: expected a finite number > 0, got 0.0"),
        ("learning_rate", -0.1, "learning_rate: expected a finite number > 0, got -0.1"),
        ("learning_rate", float("nan"), "learning_rate: expected a finite number > 0, got nan"),
        ("learning_rate", float("inf"), "learning_rate: expected a finite number > 0, got inf"),
        ("learning_rate", "0.1", "learning_rate: expected a finite number > 0, got '0.1'"),
        ("seed", -1, "seed: expected an integer >= 0, got -1"),
        ("reduction", "average", "reduction: expected 'mean' or 'sum', got 'average'"),
        ("batch_norm", "eval", "batch_norm: expected 'train' or 'freeze', got 'eval'"),
        ("device", "cuda:x", "device: expected a number after the colon, got 'cuda:x'"),
        ("loss", [], "loss: at least one loss is needed"),
        ("loss", 3, "loss: expected a name, a mapping with the key 'name', or a loss, got 3"),
        ("penalty", {"coef": {"l3": 1}}, r"penalty.*l3: unknown parameter"),
        ("penalty", {"l2": 0.1}, r"penalty\.l2: is that the penalty or a parameter's name\?"),
        ("reinitialize", "W*", r"reinitialize: no trained parameter fits 'W\*'"),
    ],
)
def test_options_out_of_range(option: str, value: Any, text: str) -> None:
    with pytest.raises(OrtflexError, match=text):
        make(models.linear(), **{option: value})


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("loss", "sqared_error", "unknown loss 'sqared_error'; did you mean 'squared_error'"),
        ("penalty", "l22", "unknown penalty 'l22'; did you mean"),
        ("optimizer", "adm", "unknown optimizer 'adm'; did you mean 'adam'"),
        ("schedule", "cosin", "unknown schedule 'cosin'; did you mean 'cosine'"),
        ("device", "gpu", "unknown device 'gpu'; .*cuda"),
        ("backend", "trainingagent", "unknown backend 'trainingagent'; did you mean 'training_ag"),
        ("metrics", ["acuracy"], "unknown metric 'acuracy'; did you mean 'accuracy'"),
        ("callbacks", ["example_stp"], "unknown callback 'example_stp'; did you mean 'example_sto"),
        ("gradients", ["matmull"], "unknown gradient family 'matmull'; did you mean 'matmul'"),
    ],
)
def test_unknown_names(option: str, value: Any, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        make(models.linear(), **{option: value})


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make(
            models.linear(),
            optimizer={"name": "adam", "bta1": 1},
            schedule="cosin",
            batch_size=0,
            metrics=["maee"],
        )
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    for part in ("optimizer.bta1", "'cosin'", "batch_size", "'maee'"):
        assert part in text


def test_cuda_without_cuda() -> None:
    if "CUDAExecutionProvider" in require_runtime().providers:
        pytest.skip("this onnxruntime has the CUDA provider")
    for device in ("cuda", "cuda:1"):
        with pytest.raises(Unsupported, match=r"the device 'cuda' cannot be used: .*install"):
            make(models.linear(), device=device)


def test_a_backend_that_this_runtime_has_not() -> None:
    runtime = require_runtime()
    if runtime.has_training_session:
        pytest.skip("this onnxruntime has all of them")
    trainer = make(models.linear(), backend={"name": "training_session"})
    with pytest.raises(Unsupported, match=r"training_session cannot train this here(.|\n)*install"):
        trainer.fit(X, Y)


@pytest.mark.parametrize(
    ("model", "loss", "text"),
    [
        (
            models.two_headed(),
            "squared_error",
            r"has 2 float outputs \(amount, scores\) and nothing says which one",
        ),
        (models.two_headed(), {"amuont": "squared_error"}, "has no tensor 'amuont'; did you mean"),
        (models.linear(), {"name": "squared_error", "predicted": "Z"}, "has no tensor 'Z'"),
        (
            models.linear(),
            {"name": "squared_error", "weight": 0.5},
            "names the input with sample w",
        ),
    ],
)
def test_what_the_loss_sees(model: Any, loss: Any, text: str) -> None:
    with pytest.raises(OrtflexError, match=text):
        make(model, loss=loss)


# Data ---------------------------------------------------------------------------------------------


def cut(array: Any, value: Any, at: int = 3) -> Any:
    out = array.copy()
    out[at] = value
    return out


@pytest.mark.parametrize(
    ("x", "y", "w", "text"),
    [
        (X[:, :3], Y, None, r"X has shape \[20, 3\], but 'X' takes \[N, 5\]"),
        (X[:, 0], Y, None, r"X has shape \[20\], but 'X' takes \[N, 5\]"),
        (X.astype("U"), Y, None, r"X has type <U\d+, but 'X' takes float32"),
        (X.astype(complex), Y, None, "X has type complex128, but 'X' takes float32"),
        (X[:19], Y, None, "different numbers of rows: X has 19, label has 20"),
        (X, Y, np.ones(19), "sample_weight has 19"),
        (X, None, None, "expects labels 'label', y has none"),
        (X[:0], Y[:0], None, "the data are empty: 0 rows"),
        (cut(X, np.nan), Y, None, r"X has a value that is not finite \(first in row 3\)"),
        (cut(X, np.inf), Y, None, r"X has a value that is not finite \(first in row 3\)"),
        (X, cut(Y, np.nan), None, r"y has a value that is not finite \(first in row 3\)"),
        (
            X,
            Y.ravel(),
            None,
            r"shape \[batch, 1\], got label: float32\[batch\].*y\.reshape\(-1, 1\)",
        ),
        (X, np.hstack([Y, Y]), None, r"shape \[batch, 1\], got label: float32\[batch, 2\]"),
        (X, Y.astype("U"), None, "has type <U.*, expected numbers"),
        (X, Y, cut(np.ones(20), -1.0), r"sample_weight must be >= 0, row 3 has .*-1\.0"),
        (X, Y, cut(np.ones(20), np.nan), "sample_weight has a value that is not finite"),
        (X, Y, np.ones((20, 3)), r"sample weights of shape \[batch, 3\] do not broadcast"),
        (X, Y, {"wieght": np.ones(20)}, "sample_weight has 'wieght', which no loss uses"),
        (X, {"lable": Y}, None, "label"),
        ({"Z": X}, Y, None, "X has 'Z'; .*Known: X"),
    ],
)
def test_data_that_do_not_fit(x: Any, y: Any, w: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        make(models.linear(), epochs=1).fit(x, y, w)


def test_values_are_checked_once_an_array_and_only_if_wanted() -> None:
    trainer = make(models.linear(), epochs=1, check_finite=False)
    trainer.fit(X, Y)
    assert np.isnan(trainer.predict(cut(X, np.nan))[3]).all()
    with pytest.raises(DataError, match="check_finite=False"):
        make(models.linear()).predict(cut(X, np.nan))


@pytest.mark.parametrize("bad", [-1, 3, 1000])
def test_labels_out_of_range(bad: int) -> None:
    x = X[:, :4]
    y = np.arange(20) % 3
    trainer = make(models.classifier(), loss="softmax_cross_entropy")
    with pytest.raises(DataError, match=rf"at least 0 and at most 2.*first is {bad} in row 3"):
        trainer.fit(x, cut(y, bad))


def test_class_labels_the_model_does_not_know() -> None:
    x, names = X[:, :4], np.array(["ant", "bee", "cat"])[np.arange(20) % 3]
    with pytest.raises(DataError, match=r"does not say their order; pass it: classes=\[…\]"):
        make(models.classifier(), loss="softmax_cross_entropy").fit(x, names)
    trainer = make(
        models.classifier(), loss="softmax_cross_entropy", classes=["ant", "bee", "dog"], epochs=1
    )
    with pytest.raises(DataError, match=r"the class 'cat' \(row 2\).*'ant', 'bee', 'dog'"):
        trainer.fit(x, names)


@every_backend
def test_a_batch_dimension_that_is_fixed(backend: str) -> None:
    model = models.linear()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    trainer = make(model, backend=backend, batch_size=4, epochs=1)
    assert len(trainer.fit(X, Y)) == 1
    assert trainer.predict(X).shape == (20, 1)
    with pytest.raises(
        DataError, match=r"fixed batch dimension.*batches of 8 of 20 rows; use batc"
    ):
        make(model, backend=backend, batch_size=8).fit(X, Y)
    with pytest.raises(DataError, match=r"fixed batch dimension.*18 rows"):
        make(model, backend=backend, batch_size=4).fit(X[:18], Y[:18])


def test_validation_data_of_a_wrong_kind() -> None:
    trainer = make(models.linear())
    for bad, text in (
        (X, r"validation_data: expected \(X, y\)"),
        (2.0, "rows on both sides; 2.0 of 20 rows"),
        ((X, Y[:3]), "different numbers of rows"),
    ):
        with pytest.raises(DataError, match=text):
            trainer.fit(X, Y, validation_data=bad)


def test_states_that_do_not_fit() -> None:
    trainer = make(models.linear())
    for state, text in (
        ({"coeff": np.zeros((5, 1))}, "unknown parameter 'coeff'; did you mean 'coef'"),
        ({"coef": np.zeros(5)}, r"'coef' is float32\[5, 1\], got float64\[5\]"),
        ({"coef": np.full((5, 1), "a")}, r"'coef' is float32\[5, 1\], got <U1\[5, 1\]"),
    ):
        with pytest.raises(DataError, match=text):
            trainer.set_state(state)
