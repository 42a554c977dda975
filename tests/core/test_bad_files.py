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

node = helper.make_node


@pytest.mark.parametrize("keep", [0, 1, 20, 0.3, 0.5, 0.9, -1])
def test_a_truncated_file(tmp_path: Path, keep: float) -> None:
    whole = models.mlp().SerializeToString()
    path = tmp_path / "cut.onnx"
    path.write_bytes(whole[: int(keep * len(whole)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(ModelError, match=r"cut\.onnx"):
        make(path)
    with pytest.raises(ModelError, match="the model"):
        make(path.read_bytes())


def broken(change: Any) -> ModelProto:
    model = models.mlp()
    change(model)
    return model


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.graph.node[0].CopyFrom(node("MatMul", ["h2", "W1"], ["m1"])), "topologic"),
        (lambda m: m.graph.node[1].CopyFrom(node("Add", ["m1", "b1"], ["m1"])), "m1"),
        (lambda m: m.graph.node[2].CopyFrom(node("Tanh", ["nobody"], ["h1"])), "nobody"),
        (lambda m: m.graph.node[2].CopyFrom(node("Tahn", ["a1"], ["h1"])), "Tahn"),
        (lambda m: m.graph.node[0].CopyFrom(node("MatMul", ["X", "W1"], ["W2"])), "W2"),
        (lambda m: m.graph.initializer.append(m.graph.initializer[0]), "W1"),
        (lambda m: m.graph.input.append(m.graph.input[0]), "X"),
    ],
    ids=["circle", "output twice", "dangling", "misnamed", "weight too", "weight twice", "X twice"],
)
def test_graphs_that_are_not_valid(change: Any, text: str) -> None:
    with pytest.raises(ModelError, match=rf"is not a valid ONNX model: (.|\n)*{text}"):
        make(broken(change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: setattr(m.opset_import[0], "version", 999), "opset|No Op registered|version"),
        (lambda m: m.ClearField("opset_import"), "imports no standard operators|opset"),
        (lambda m: m.graph.ClearField("node"), "has no nodes"),
    ],
    ids=["too new for anybody", "no opset", "no nodes"],
)
def test_graphs_that_are_none(change: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        make(broken(change))


@every_backend
def test_shapes_that_do_not_fit_each_other(backend: str) -> None:
    array = onnx.numpy_helper.from_array(np.zeros((3, 8), np.float32), "W1")
    model = broken(lambda m: m.graph.initializer[0].CopyFrom(array))
    with pytest.raises(OrtflexError, match=r"(?i)matmul"):
        make(model, backend=backend).fit(*regression(rows=20, features=6))


# Parameters ---------------------------------------------------------------------------------------


def test_a_model_without_float_parameters() -> None:
    with pytest.raises(ModelError, match="has no float parameter to train that reaches Y"):
        make(models.parsed("Y = Tanh(X)", {}, outputs="float[N, 6] Y"))


def test_weights_that_are_attributes_of_a_form_that_is_not_known() -> None:
    text = 'ai.onnx.ml.LinearRegressor<coefficients = [1.0, 1.0], post_transform = "PROBIT">'
    model = models.parsed(f"Y = {text}(X)", {}, "float[N, 2] X", "float[N, 1] Y", ai_onnx_ml=3)
    with pytest.raises(ModelError, match=r"the weights of LinearRegressor are attributes"):
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
