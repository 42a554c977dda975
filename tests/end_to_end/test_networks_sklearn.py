"""scikit-learn's networks and linear models through skl2onnx: every gradient, and fifty steps."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from ortflex_core.errors import ModelError
from ortflex_core.types import Array
from tests.training import make

sklearn = pytest.importorskip("sklearn")
skl2onnx = pytest.importorskip("skl2onnx")

from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.neural_network import MLPClassifier, MLPRegressor  # noqa: E402

RNG = np.random.default_rng(17)
X = RNG.standard_normal((30, 5)).astype(np.float32)
Y = np.digitize(X[:, 0] + X[:, 1], [-0.6, 0.6])
RATE = 0.1


def converted(model: Any, **options: Any) -> Any:
    types = [("X", skl2onnx.common.data_types.FloatTensorType([None, X.shape[1]]))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's attributes it asks for
        return skl2onnx.convert_sklearn(model, initial_types=types, target_opset=17, **options)


def fitted(model: Any, y: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has not converged
        return model.fit(X.astype(np.float64), y)


def step(
    weights: list[Array], biases: list[Array], y: Array, classes: bool
) -> tuple[float, list[Array], list[Array]]:
    """Loss and gradients of a tanh network in numpy: cross entropy, or the squared error."""
    layers = [X.astype(np.float64)]
    for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
        z = layers[-1] @ w + b
        layers.append(np.tanh(z) if k < len(weights) - 1 else z)
    scores = layers.pop()
    if classes:
        scores = scores - scores.max(1, keepdims=True)
        p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        loss = -np.log(p[np.arange(len(y)), y]).mean()
        g = (p - np.eye(p.shape[1])[y]) / len(y)
    else:
        loss = ((scores - y) ** 2).mean()
        g = 2 * (scores - y) / y.size
    dw, db = [], []
    for h, w in zip(layers[::-1], weights[::-1], strict=True):
        dw.append(h.T @ g)
        db.append(g.sum(0))
        g = (g @ w.T) * (1 - h * h)
    return float(loss), dw[::-1], db[::-1]


def follow(proto: Any, weights: list[Array], biases: list[Array], y: Array, **loss: Any) -> None:
    """The first gradient and the losses of fifty steps, running freely."""
    trainer = make(
        proto, optimizer="sgd", learning_rate=RATE, batch_size=30, backend="fused", **loss
    )
    names: dict[str, int] = {}
    old = trainer.get_state()
    for k, array in enumerate([*weights, *biases]):
        found = [
            n
            for n, a in old.items()
            if a.size == array.size and np.allclose(a.ravel(), array.ravel(), atol=1e-6)
        ]
        assert len(found) == 1, (found, array)
        names[found[0]] = k
    assert set(names) == set(old)
    for n in range(50):
        expected, dw, db = step(weights, biases, y, y.dtype.kind == "i")
        got = trainer.step((X, y if y.dtype.kind == "i" else y.astype(np.float32)))
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5), n
        if n == 0:
            new = trainer.get_state()
            largest = max(np.linalg.norm(g) for g in [*dw, *db])
            for name, k in names.items():
                g = [*dw, *db][k]
                found_g = (old[name].astype(np.float64) - new[name]).reshape(g.shape) / RATE
                # The weights before and after were rounded to float32.
                rounding = np.linalg.norm(old[name]) * 2e-7 / RATE
                error = np.linalg.norm(found_g - g)
                assert error <= 1e-4 * np.linalg.norm(g) + 1e-6 * largest + rounding, name
        weights = [w - RATE * g for w, g in zip(weights, dw, strict=True)]
        biases = [b - RATE * g for b, g in zip(biases, db, strict=True)]


@pytest.mark.parametrize("layers", [(6,), (7, 4)])
def test_regressor(layers: tuple[int, ...]) -> None:
    y = X[:, :1] ** 2
    model = fitted(
        MLPRegressor(hidden_layer_sizes=layers, activation="tanh", max_iter=3, random_state=0), y
    )
    follow(converted(model), model.coefs_, model.intercepts_, y, loss="squared_error")


@pytest.mark.parametrize("layers", [(6,), (7, 4)])
def test_classifier(layers: tuple[int, ...]) -> None:
    model = fitted(
        MLPClassifier(hidden_layer_sizes=layers, activation="tanh", max_iter=3, random_state=0), Y
    )
    proto = converted(model, options={"zipmap": False})
    follow(
        proto, model.coefs_, model.intercepts_, Y, loss={"probabilities": "softmax_cross_entropy"}
    )


def test_logistic_regression_without_its_operator() -> None:
    model = fitted(LogisticRegression(max_iter=2), Y)
    proto = converted(model, options={"zipmap": False}, black_op={"LinearClassifier"})
    follow(
        proto,
        [model.coef_.T],
        [model.intercept_],
        Y,
        loss={"probabilities": "softmax_cross_entropy"},
    )


def test_logistic_regression_with_its_operator_is_refused() -> None:
    proto = converted(fitted(LogisticRegression(max_iter=2), Y), options={"zipmap": False})
    with pytest.raises(ModelError, match=r"black_op=\{'LinearClassifier'\} to get MatMul and Add"):
        make(proto, loss={"probabilities": "softmax_cross_entropy"}, backend="fused")
