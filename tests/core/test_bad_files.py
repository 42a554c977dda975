"""Bad files: each is an ortflex error that says what, where, expected and got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from ortflex_core import Model, ModelError, OrtflexError
from tests import models
from tests.training import every_backend, make, regression

X, Y = regression(rows=20)


# The file -----------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the file '.*nowhere\.onnx' does not exist"):
        make(tmp_path / "nowhere.onnx")


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is a folder; pass the \.onnx file in it"):
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
    with pytest.raises(OrtflexError, match=r"(?i)matmul"):
        make(broken(misshapen), backend=backend).fit(*regression(rows=20, features=6))


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


def test_weights_that_are_attributes_of_a_form_that_is_not_known() -> None:
    node = helper.make_node(
        "LinearRegressor",
        ["X"],
        ["Y"],
        domain="ai.onnx.ml",
        coefficients=[1.0] * 5,
        post_transform="PROBIT",
    )
    model = models.model([node], [models.floats("X", "N", 5)], [models.floats("Y", "N", 1)], {})
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    with pytest.raises(ModelError, match=r"the weights of LinearRegressor are attributes"):
        make(model)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"raw_data": bytes(100)}, r"initializer 'coef' declares the shape \[60, 50\]"),
        ({"raw_data": b""}, r"initializer 'coef' .*needs 12000 bytes, but 0 are given"),
        ({"dims": [2**40, 50]}, r"'coef' .*1099511627776.*but 12000 are given"),
        ({"data_type": 99}, r"'coef' .*the type 99, but ONNX does not define"),
    ],
)
def test_large_tensors_whose_data_do_not_fit(change: dict[str, Any], text: str) -> None:
    model = models.linear(60, 50)
    tensor = next(t for t in model.graph.initializer if t.name == "coef")
    for field, value in change.items():
        tensor.ClearField(field)
        if field == "dims":
            tensor.dims.extend(value)
        else:
            setattr(tensor, field, value)
    with pytest.raises(ModelError, match=text):
        make(model)


def test_half_precision_that_is_not_converted_is_refused() -> None:
    model = models.linear()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    with pytest.raises(ModelError, match="parameter 'coef' is float16; float32 and float64 can be"):
        make(Model(model, raise_half=False))


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


@pytest.mark.parametrize("thing", [None, 3, object(), ["model.onnx"]])
def test_what_is_no_model_is_refused_with_what_to_do(thing: Any) -> None:
    with pytest.raises(ModelError, match=r"expected a path, bytes or a ModelProto, got .*export"):
        make(thing)
