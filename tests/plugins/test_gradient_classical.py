"""Gradients through operators of ai.onnx.ml, against central differences of their definitions in float64.

The class: a pipeline has such an operator between two parts with weights (a projection, a scaler, a
network). Their definitions here are numpy's, and onnxruntime's forward has to equal them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Array, NoGradientRule, gradient_model
from tests import models
from tests.training import plugins

RNG = np.random.default_rng(5)
X = RNG.standard_normal((4, 3)).astype(np.float32)
HOLES = np.where(X > 0.8, np.float32(7), X)
OFFSET, SCALE = [0.5, -1.0, 2.0], [2.0, -0.5, 3.0]
COEFFICIENTS = RNG.standard_normal(6).astype(np.float32)
PLACES = np.array([2, 0, 2])


def made(operator: str, x: Array, outputs: int, **attributes: Any) -> onnx.ModelProto:
    inputs = ["x", "places"] if operator == "ArrayFeatureExtractor" else ["x"]
    node = models.helper.make_node(operator, inputs, ["y"], domain="ai.onnx.ml", **attributes)
    weights = {"places": PLACES} if len(inputs) > 1 else {}
    shape = ["N", *x.shape[1:]] if x.ndim > 1 else list(x.shape)
    y = models.floats("y", None, outputs)
    return models.model([node], [models.floats("x", *shape)], [y], weights, ai_onnx_ml=3)


def of_rows(x: Array, norm: Array) -> Array:
    return x / np.where(norm == 0, 1, norm)


Formula = Callable[[Array], Array]
CASES: dict[str, tuple[str, Array, dict[str, Any], Formula]] = {
    "columns": ("ArrayFeatureExtractor", X, {}, lambda x: x[:, PLACES]),
    "columns of a vector": ("ArrayFeatureExtractor", X[0], {}, lambda x: x[None, PLACES]),
    "scaler": ("Scaler", X, {"offset": OFFSET, "scale": SCALE}, lambda x: (x - OFFSET) * SCALE),
    "one scale": ("Scaler", X, {"offset": [0.5], "scale": [-3.0]}, lambda x: (x - 0.5) * -3),
    "imputer": (
        "Imputer",
        HOLES,
        {"imputed_value_floats": [0.25], "replaced_value_float": 7.0},
        lambda x: np.where(abs(x - 7) < 0.1, 0.25, x),
    ),
    "normalizer L1": (
        "Normalizer",
        X,
        {"norm": "L1"},
        lambda x: of_rows(x, np.abs(x).sum(1)[:, None]),
    ),
    "normalizer L2": (
        "Normalizer",
        X,
        {"norm": "L2"},
        lambda x: of_rows(x, np.sqrt((x * x).sum(1, keepdims=True))),
    ),
    "linear regressor": (
        "LinearRegressor",
        X,
        {"coefficients": COEFFICIENTS.tolist(), "intercepts": [0.5, 1.0], "targets": 2},
        lambda x: x @ COEFFICIENTS.reshape(2, 3).T + [0.5, 1.0],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_central_differences(name: str) -> None:
    operator, x, attributes, formula = CASES[name]
    wanted = formula(x.astype(np.float64))
    proto = made(operator, x, wanted.shape[1], **attributes)
    g = np.random.default_rng(1).standard_normal(wanted.shape).astype(np.float32)
    program = gradient_model(proto, ["x"], plugins=plugins())
    got = models.predict(program, {"x": x, "cotangent/y": g})
    np.testing.assert_allclose(got["y"], wanted, rtol=1e-5, atol=1e-6)
    expected = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        step = np.zeros(x.shape)
        step[place] = 1e-6
        difference = formula(x + step) - formula(x - step)
        expected[place] = (difference * g).sum() / 2e-6
    np.testing.assert_allclose(got["gradient/x"], expected, rtol=1e-4, atol=1e-5)


def test_forms_without_a_rule_are_named() -> None:
    with pytest.raises(NoGradientRule, match="norm='MAX'"):
        gradient_model(made("Normalizer", X, 3, norm="MAX"), ["x"], plugins=plugins())
