"""scikit-learn's networks and linear models through skl2onnx: every gradient, and fifty steps."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from ortflex_core import Array, ModelError
from tests.training import make

sklearn = pytest.importorskip("sklearn")
skl2onnx = pytest.importorskip("skl2onnx")

from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.neural_network import MLPClassifier, MLPRegressor  # noqa: E402

RNG = np.random.default_rng(17)
X = RNG.standard_normal((30, 5)).astype(np.float32)
Y = np.digitize(X[:, 0] + X[:, 1], [-0.6, 0.6])
RATE, ADAM_RATE = 0.1, 0.01


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
    """Loss and gradients of a tanh network in numpy: cross entropy, or the squared error.

    One score for two classes is that of the second.
    """
    layers = [X.astype(np.float64)]
    for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
        z = layers[-1] @ w + b
        layers.append(np.tanh(z) if k < len(weights) - 1 else z)
    scores = layers.pop()
    if classes and scores.shape[1] == 1:
        loss = np.mean(np.logaddexp(0, scores) - y * scores)
        g = (1 / (1 + np.exp(-scores)) - y) / len(y)
    elif classes:
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


class Descent:
    """Plain gradient descent, and Kingma and Ba's algorithm 1, in float64."""

    def __init__(self, optimizer: str) -> None:
        self.adam, self.t = optimizer == "adam", 0
        self.moments: dict[int, tuple[Any, Any]] = {}

    def step(self, weights: list[Array], slopes: list[Array]) -> list[Array]:
        self.t += 1
        if not self.adam:
            return [w - RATE * g for w, g in zip(weights, slopes, strict=True)]
        out = []
        for k, (w, g) in enumerate(zip(weights, slopes, strict=True)):
            m, v = self.moments.get(k, (0.0, 0.0))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            self.moments[k] = m, v
            move = (m / (1 - 0.9**self.t)) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8)
            out.append(w - ADAM_RATE * move)
        return out


def follow(proto: Any, weights: list[Array], biases: list[Array], y: Array, **loss: Any) -> None:
    """The first gradient and the losses of fifty steps, running freely, of SGD and of Adam."""
    for optimizer in ("sgd", "adam"):
        run_freely(proto, weights, biases, y, optimizer, **loss)


def run_freely(
    proto: Any, weights: list[Array], biases: list[Array], y: Array, optimizer: str, **loss: Any
) -> None:
    rate = RATE if optimizer == "sgd" else ADAM_RATE
    trainer = make(
        proto, optimizer=optimizer, learning_rate=rate, batch_size=30, backend="fused", **loss
    )
    descent = Descent(optimizer)
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
        if n == 0 and optimizer == "sgd":
            new = trainer.get_state()
            largest = max(np.linalg.norm(g) for g in [*dw, *db])
            for name, k in names.items():
                g = [*dw, *db][k]
                found_g = (old[name].astype(np.float64) - new[name]).reshape(g.shape) / RATE
                # The weights before and after were rounded to float32.
                rounding = np.linalg.norm(old[name]) * 2e-7 / RATE
                error = np.linalg.norm(found_g - g)
                assert error <= 1e-4 * np.linalg.norm(g) + 1e-6 * largest + rounding, name
        moved = descent.step([*weights, *biases], [*dw, *db])
        weights, biases = moved[: len(weights)], moved[len(weights) :]


@pytest.mark.parametrize("layers", [(6,), (7, 4)])
@pytest.mark.parametrize("kind", ["regressor", "classifier", "classifier of two"])
def test_networks(kind: str, layers: tuple[int, ...]) -> None:
    """The file of a classifier of two computes 1 - p from a constant, which stays one."""
    y = {"regressor": X[:, :1] ** 2, "classifier": Y}.get(kind, (Y > 0).astype(np.int64))
    build = MLPRegressor if kind == "regressor" else MLPClassifier
    settings = {"hidden_layer_sizes": layers, "activation": "tanh", "max_iter": 3}
    model = fitted(build(**settings, random_state=0), y)
    losses: dict[str, tuple[Any, dict[str, Any]]] = {
        "regressor": ("squared_error", {}),
        "classifier": ({"probabilities": "softmax_cross_entropy"}, {"zipmap": False}),
        "classifier of two": ({"probabilities": "log_loss"}, {"zipmap": False}),
    }
    loss, options = losses[kind]
    proto = converted(model, **({"options": options} if options else {}))
    labels = y.reshape(-1, 1) if "two" in kind else y
    follow(proto, model.coefs_, model.intercepts_, labels, loss=loss)


def test_logistic_regression_of_two_classes() -> None:
    """Its file divides two sigmoids by their sum: probabilities, and no scores of a softmax."""
    y = (Y > 0).astype(np.int64)
    model = fitted(LogisticRegression(max_iter=2), y)
    proto = converted(model, options={"zipmap": False}, black_op={"LinearClassifier"})
    trainer = make(
        proto,
        loss={"probabilities": {"name": "log_loss", "on": "probabilities"}},
        batch_size=30,
        backend="fused",
    )
    p = model.predict_proba(X)[np.arange(30), y]
    assert trainer.step((X, y)) == pytest.approx(-np.log(p).mean(), rel=1e-5)
    with pytest.raises(
        ModelError, match="expects logits, but 'probabilities' has normalized scores"
    ):
        make(proto, loss={"probabilities": "softmax_cross_entropy"}, backend="fused")


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


@pytest.mark.parametrize("count", [2, 3])
def test_logistic_regression_with_its_operator(count: int) -> None:
    """The gradient of the formula in float64; the trained file has the operator, with new coefficients."""
    y = np.minimum(Y, count - 1)
    model = fitted(LogisticRegression(max_iter=2), y)
    proto = converted(model, options={"zipmap": False})
    loss = "log_loss" if count == 2 else "softmax_cross_entropy"
    follow(
        proto,
        [model.coef_.T],
        [model.intercept_],
        y.reshape(-1, 1) if count == 2 else y,
        loss={"probabilities": loss},
    )
    trainer = make(proto, loss={"probabilities": loss}, backend="fused")
    assert trainer.export().SerializeToString() == proto.SerializeToString()  # same bits, untrained
    trainer.fit(X, y)
    trained = trainer.export()
    assert [n.op_type for n in trained.graph.node] == [n.op_type for n in proto.graph.node]
    label, p = ReferenceEvaluator(trained).run(None, {"X": X})
    np.testing.assert_allclose(trainer.predict(X, "probabilities"), p, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(label, p.argmax(axis=1))
