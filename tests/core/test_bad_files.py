"""Bad files: each is an ortflex error that says what, where, expected and got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from ortflex_core import (
    DataError,
    GraphError,
    Loss,
    Model,
    ModelError,
    OrtflexError,
    Trainer,
    Unsupported,
)
from tests import models
from tests.training import every_backend, make, regression

node = helper.make_node
X, Y = regression(rows=20, features=6)


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
        (lambda m: setattr(m.opset_import[0], "version", 999), "No Op registered|version|opset"),
        (lambda m: m.ClearField("opset_import"), "imports no standard operators|opset"),
        (lambda m: m.graph.ClearField("node"), "has no nodes"),
    ],
    ids=[
        *(
            "circle",
            "output twice",
            "dangling",
            "misnamed",
            "weight too",
            "weight twice",
            "X twice",
        ),
        *("too new for anybody", "no opset", "no nodes"),
    ],
)
def test_graphs_that_are_not_valid(change: Any, text: str) -> None:
    valid = "opset" in text or "has no" in text  # for the checker of onnx
    prefix = "" if valid else r"is not a valid ONNX model: (.|\n)*"
    with pytest.raises(ModelError, match=f"{prefix}({text})"):
        make(broken(change))


@every_backend
def test_shapes_that_do_not_fit_each_other(backend: str) -> None:
    array = onnx.numpy_helper.from_array(np.zeros((3, 8), np.float32), "W1")
    model = broken(lambda m: m.graph.initializer[0].CopyFrom(array))
    with pytest.raises(OrtflexError, match=r"(?i)matmul"):
        make(model, backend=backend).fit(X, Y)


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


# Graphs that cannot be trained as they are: errors that say where, why and what to do -------------


RULES = ("fused", "example_numpy")
by_rules = pytest.mark.parametrize("backend", RULES)


def behind_a_step() -> ModelProto:
    weights = {"W": np.ones((6, 4)), "V": np.ones((4, 1))}
    body = "m = MatMul(X, W)  f = Floor(m)  Y = MatMul(f, V)"
    model = models.parsed(body, weights, outputs="float[N, 1] Y")
    model.graph.node[1].name = "cut"
    return model


@by_rules
def test_a_parameter_that_no_gradient_reaches_is_to_be_left_out(backend: str) -> None:
    text = (
        r"no gradient reaches 'W' \[6, 4\]: every path .* ends at .*'cut' \(Floor\)"
        r".*Do not train such parameters: params=\['\*', '!name'\]"
    )
    with pytest.raises(Unsupported, match=text):
        make(behind_a_step(), backend=backend).fit(X, Y)
    trainer = make(behind_a_step(), backend=backend, params=["*", "!W"], epochs=1)
    trainer.fit(X, Y)
    assert list(trainer.get_state()) == ["V"]


@attrs.frozen(kw_only=True)
class Steps(Loss):
    name = "steps"

    def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
        return op.Floor(op.Abs(predicted - expected))


@attrs.frozen(kw_only=True)
class StepsWithGradient(Steps):
    def gradient(self, op: Any, predicted: Any, expected: Any, cotangent: Any) -> Any:
        return cotangent * op.Sign(predicted - expected)


@by_rules
def test_a_loss_that_is_not_differentiable_needs_a_gradient_of_its_own(backend: str) -> None:
    text = r"the steps loss on 'Y' cannot be differentiated: .*\(Floor\)\. .*its gradient\(\)"
    with pytest.raises(OrtflexError, match=text):
        make(models.mlp(), loss=Steps(), backend=backend).fit(X, Y)
    make(models.mlp(), loss=StepsWithGradient(), backend=backend, epochs=1).fit(X, Y)


# Sizes ------------------------------------------------------------------------------------------


def flattened() -> ModelProto:
    weights = {"W": np.ones((6, 1))}
    body = "f = Flatten(X)  Y = MatMul(f, W)"
    return models.parsed(body, weights, "float[N, C, L] X", "float[N, 1] Y")


@by_rules
def test_dynamic_dimensions_that_do_not_fit_the_weights(backend: str) -> None:
    make(flattened(), backend=backend, epochs=1).fit(X.reshape(20, 2, 3), Y)
    text = r"cannot run on X \[20, 1, 3\] \(the model expects \[N, C, L\]\): .*MatMul"
    trainer = make(flattened(), backend=backend, epochs=1)
    with pytest.raises(DataError, match=text):
        trainer.fit(X.reshape(20, 2, 3)[:, :1], Y)
    with pytest.raises(DataError, match=text):
        trainer.step((X.reshape(20, 2, 3)[:, :1], Y))


def free_sizes(frozen: int) -> ModelProto:
    """A product whose rows have a free size, in the prefix (``frozen`` = 1) or behind it (2)."""
    rng = np.random.default_rng(0)
    sizes = {"a": (16, 5), "b": (5, 3)} if frozen == 1 else {"a": (4, 4), "b": (16, 3)}
    body = "f = Flatten(X)  g = MatMul(f, a)  Y = MatMul(g, b)"
    if frozen == 2:
        body = "f = MatMul(X, a)  g = Flatten(f)  Y = MatMul(g, b)"
    weights = {name: rng.standard_normal(size) for name, size in sizes.items()}
    return models.parsed(body, weights, "float[n, h, 4] X", "float[n, 3] Y")


@pytest.mark.parametrize("frozen", [1, 2])
@pytest.mark.parametrize("cache", ["auto", "memory", False])
def test_rows_of_another_shape_are_reported_as_the_user_gave_them(frozen: int, cache: Any) -> None:
    """Neither the rows of a test nor derived columns are in the message."""
    x, y = np.ones((30, 4, 4), np.float32), np.arange(30) % 3
    wrong = np.ones((30, 5, 4), np.float32)
    options: dict[str, Any] = {"params": ["b"], "batch_size": 8, "epochs": 1, "cache": cache}
    text = r"the model cannot run on X \[(30|8|rows), 5, 4\] \(the model expects \[n, h, 4\]\): .*MatMul"

    def made() -> Trainer:
        return make(free_sizes(frozen), loss="softmax_cross_entropy", **options)

    with pytest.raises(DataError, match=f"^validation data: {text}"):
        made().fit(x, y, validation_data=(wrong, y))
    with pytest.raises(DataError, match=f"^{text}"):
        made().step((wrong, y))
    trained = made()
    trained.fit(x, y)
    for call in (made().fit, trained.fit, trained.evaluate, trained.find_rate):
        with pytest.raises(DataError, match=f"^{text}"):
            call(wrong, y)


W = {"W": np.ones((6, 1))}


@by_rules
def test_a_dimension_that_cannot_be_resolved(backend: str) -> None:
    body = "m = MatMul(X, W)  Y = Compress<axis = 0>(m, keep)"
    selecting = models.parsed(body, W, "float[N, 6] X, bool[N] keep", "float[M, 1] Y")
    keep = np.arange(20) % 2 == 0
    text = r"'Y', which the squared_error loss reads, has shape \[10, 1\] for a batch of 20 rows"
    with pytest.raises(DataError, match=text):
        make(selecting, backend=backend, epochs=1).fit({"X": X, "keep": keep}, Y)


@by_rules
def test_one_prediction_for_all_rows_is_no_broadcast(backend: str) -> None:
    body = "m = MatMul(X, W)  Y = ReduceMean<axes = [0]>(m)"
    aggregating = models.parsed(body, W, outputs="float[1, 1] Y")
    trainer = make(aggregating, backend=backend, epochs=1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"has shape \[1, 1\] for a batch of 20 rows"):
            trainer.fit(X, Y)


# Operators ----------------------------------------------------------------------------------------


@by_rules
def test_an_operator_without_a_kernel(backend: str) -> None:
    weights = {"K": np.ones((1, 1, 3)), "W": np.ones((4, 1))}
    body = "c = Conv(X, K)  Y = MatMul(c, W)"
    model = models.parsed(body, weights, "float[N, 1, 6] X", "float[N, 1, 1] Y")
    model.graph.node[0].name = "window"
    text = r"no kernel on cpu for the operator Conv of ai\.onnx opset 17, node 'window'.*float32"
    x, y = X[:, None].astype(np.float64), Y[:, None].astype(np.float64)
    with pytest.raises(GraphError, match=text):
        make(models.in_float64(model), backend=backend, epochs=1).fit(x, y)


def test_an_unknown_operator_is_an_error() -> None:
    body = "m = MatMul(X, W)  Y = acme.Frobnicate(m)"
    model = models.parsed(body, W, outputs="float[N, 1] Y", acme=1)
    model.graph.node[1].name = "frob"
    with pytest.raises(OrtflexError, match=r"no gradient rule for .*Frobnicate of acme .*'frob'"):
        make(model, backend="fused").fit(X, Y)
    with pytest.raises(GraphError, match=r"no kernel on cpu for the operator Frobnicate of acme"):
        make(model, backend="fused").predict(X)


def test_a_number_of_rows_inside_the_graph_is_named_with_the_way_out() -> None:
    """Exporters that trace an example can write its rows into a mask, and leave the input free."""
    model = models.parsed(  # how many places NonZero finds is known when it runs
        "places = NonZero(mask)  column = Transpose(places)  zeros = Cast<to = 1>(column)"
        "  h = Add(X, zeros)  Y = MatMul(h, w)",
        {"mask": np.ones(4), "w": np.ones((3, 2))},
        "float[n, 3] X",
        "float[n, 2] Y",
    )
    x, y = np.ones((10, 3), np.float32), np.ones((10, 2), np.float32)
    with pytest.raises(DataError, match=r"batch_size.*drop_last"):
        make(model, params=["w"], batch_size=5, backend="fused").fit(x, y)
    trainer = make(model, params=["w"], batch_size=4, epochs=1, drop_last=True, backend="fused")
    assert trainer.fit(x, y)[-1]["rows"] == 8
