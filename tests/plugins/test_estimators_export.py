"""Pipelines that end in an estimator around a user.s model, converted by skl2onnx."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

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
    "newer": (18, "axes = Constant<value_ints=[1]>() m = ReduceMean(x, axes)"),
    "older": (12, "m = ReduceSum<axes=[1]>(x)"),
    "images": (17, "c = Conv(x, K) f = Flatten(c) y = MatMul(f, V)"),
}
PRODUCT = "z = MatMul(x, W) y = Add(z, m)"


def given(name: str, product: str = PRODUCT) -> onnx.ModelProto:
    opset, body = BODIES[name]
    rng = np.random.default_rng(0)
    if name == "images":
        weights = {"K": rng.standard_normal((2, 1, 2, 2)), "V": rng.standard_normal((2, 1))}
        return models.parsed(body, weights, "float[N, 1, 2, 2] x", "float[N, 1] y", opset=opset)
    weights = {"W": rng.standard_normal((4, 1))}
    ends = "float[N, 4] x", "float[N, 1] y"
    return models.parsed(f"{body} {product}", weights, *ends, opset=opset)


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
    branches = """z = MatMul(x, W) yes = Constant<value = bool {1}>() y = If(yes) <
        then_branch = t () => (float[N, 1] sum) { sum = Add(z, m) },
        else_branch = e () => (float[N, 1] difference) { difference = Sub(z, m) }>"""
    model = given("newer", branches)
    pipeline = make_pipeline(StandardScaler(), OrtRegressor(model, **SHORT)).fit(x, y)
    said = r"the body of the If .* reads tensors of the graph around it"
    with pytest.raises(ModelError, match=said):
        pipeline_to_onnx(pipeline, x)
