"""Pipelines that end in an estimator around a user.s model, converted by skl2onnx."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("sklearn")
pytest.importorskip("skl2onnx")

from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ortflex_core import ModelError
from ortflex_plugins.estimators import OrtClassifier, OrtRegressor, pipeline_to_onnx
from tests import models

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
SHORT: dict[str, Any] = {"max_iter": 2, "learning_rate": 1e-3, "random_state": 0}
BODIES = {
    "newer": (
        18,
        "{ axes = Constant<value_ints=[1]>() m = ReduceMean(x, axes) z = MatMul(x, W) y = Add(z, m) }",
    ),
    "older": (12, "{ m = ReduceSum<axes=[1]>(x) z = MatMul(x, W) y = Add(z, m) }"),
    "images": (17, "{ c = Conv(x, K) f = Flatten(c) y = MatMul(f, V) }"),
}


def given(name: str) -> onnx.ModelProto:
    opset, body = BODIES[name]
    rng = np.random.default_rng(0)
    sizes = "1, 2, 2" if name == "images" else "4"
    model = onnx.parser.parse_model(
        f'<ir_version: 7, opset_import: ["": {opset}]> '
        f"g (float[N, {sizes}] x) => (float[N, 1] y) {body}"
    )
    shapes = {"W": (4, 1), "K": (2, 1, 2, 2), "V": (2, 1)}
    for weight in shapes if name != "images" else ("K", "V"):
        if name != "images" and weight != "W":
            continue
        array = rng.standard_normal(shapes[weight]).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, weight))
    return model


def iris() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_iris(return_X_y=True)
    return x.astype(np.float32), y


@pytest.mark.parametrize("name", list(BODIES))
@pytest.mark.parametrize("cls", [OrtRegressor, OrtClassifier])
def test_models_of_other_opsets_and_of_images(name: str, cls: Any) -> None:
    x, y = iris()
    y = (y == 1).astype(int)
    pipeline = make_pipeline(StandardScaler(), cls(given(name), **SHORT)).fit(x, y)
    options = {} if cls is OrtRegressor else {"options": {"zipmap": False}}
    model = pipeline_to_onnx(pipeline, x, **options)
    onnx.checker.check_model(model, full_check=True)
    made = models.predict(model, {"X": x})
    if cls is OrtRegressor:
        [values] = made.values()
        np.testing.assert_allclose(values.ravel(), pipeline.predict(x), rtol=1e-4, atol=1e-4)
    else:
        np.testing.assert_allclose(made["probabilities"], pipeline.predict_proba(x), atol=1e-5)
        np.testing.assert_array_equal(made["label"], pipeline.predict(x))


def test_an_opset_that_is_asked_for() -> None:
    x, y = iris()
    new = make_pipeline(StandardScaler(), OrtRegressor(given("newer"), **SHORT)).fit(x, y)
    with pytest.raises(ModelError, match=r"has opset 18, .* opset 17; pass target_opset=18"):
        pipeline_to_onnx(new, x, target_opset=17)
    old = make_pipeline(StandardScaler(), OrtRegressor(given("older"), **SHORT)).fit(x, y)
    model = pipeline_to_onnx(old, x, target_opset=15)
    assert {o.domain: o.version for o in model.opset_import}[""] == 15
    [values] = models.predict(model, {"X": x}).values()
    np.testing.assert_allclose(values.ravel(), old.predict(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 3])
def test_margins_take_the_place_of_probabilities(classes: int) -> None:
    x, y = iris()
    y = y if classes == 3 else (y == 1).astype(int)
    pipeline = make_pipeline(StandardScaler(), OrtClassifier(loss="hinge", **SHORT)).fit(x, y)
    made = models.predict(pipeline_to_onnx(pipeline, x, options={"zipmap": False}), {"X": x})
    second = made["probabilities"] if classes == 3 else made["probabilities"][:, 1]
    np.testing.assert_allclose(second, pipeline.decision_function(x), atol=1e-4)
    np.testing.assert_array_equal(made["label"], pipeline.predict(x))


def test_errors_say_what_cannot_be_converted() -> None:
    x, y = iris()
    with pytest.raises(NotFittedError, match="not fitted"):
        pipeline_to_onnx(make_pipeline(StandardScaler(), OrtRegressor()), x)
    model = given("newer")
    [product] = [n for n in model.graph.node if n.op_type == "MatMul"]
    both = [
        helper.make_graph(
            [helper.make_node(op, ["z", "m"], [out])], op, [], [models.floats(out, "N", 1)]
        )
        for op, out in (("Add", "sum"), ("Sub", "difference"))
    ]
    nodes = [
        *model.graph.node[:2],
        product,
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["y"], then_branch=both[0], else_branch=both[1]),
    ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    pipeline = make_pipeline(StandardScaler(), OrtRegressor(model, **SHORT)).fit(x, y)
    with pytest.raises(
        ModelError, match=r"the body of the If .* reads tensors of the graph around it"
    ):
        pipeline_to_onnx(pipeline, x)
