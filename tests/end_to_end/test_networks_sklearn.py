"""Networks, linear models and pipelines of scikit-learn: gradients, other classes, strings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from ortflex_core import Array, ModelError, Recipe, Trainer, internals_of
from tests import models
from tests.plugins.commands import works
from tests.training import make, plugins

sklearn = pytest.importorskip("sklearn")
skl2onnx = pytest.importorskip("skl2onnx")

from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: E402
from sklearn.linear_model import LogisticRegression, SGDClassifier  # noqa: E402
from sklearn.neural_network import MLPClassifier, MLPRegressor  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import OneHotEncoder, StandardScaler  # noqa: E402

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


# A new head ---------------------------------------------------------------------------------------


# The class of errors: a file whose scores have the new classes, and whose labels are still the old ones.
ROWS = np.random.default_rng(0).standard_normal((120, 4)).astype(np.float32)
OLD: dict[str, Any] = {
    "numbers": np.array([7, 8, 9]),
    "strings": np.array(["a", "b", "c"]),
    "two strings": np.array(["a", "b"]),
}
NEW: dict[str, Any] = {
    "numbers": [10, 20, 30, 40, 50],
    "strings": list("vwxyz"),
    "two strings": list("vwxyz"),
}
MODELS = {
    "logistic regression": LogisticRegression,
    "SGD": lambda: SGDClassifier(loss="log_loss"),
    "hinge": SGDClassifier,
    "network": lambda: MLPClassifier((8,), max_iter=5, random_state=0),
    "scaled": lambda: make_pipeline(StandardScaler(), LogisticRegression()),
}


@pytest.mark.parametrize("zipmap", [True, False], ids=["zipmap", "array"])
@pytest.mark.parametrize("labels", OLD)
@pytest.mark.parametrize("name", MODELS)
def test_labels_and_zipmap_follow_the_new_head(name: str, labels: str, zipmap: bool) -> None:
    known, new = OLD[labels], np.array(NEW[labels])
    old = known[np.argmax(ROWS[:, : len(known)], axis=1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the network has not converged
        fitted = MODELS[name]().fit(ROWS, old)
    opsets = {"": 17, "ai.onnx.ml": 3}  # every runtime of the tests reads them
    file = skl2onnx.to_onnx(fitted, ROWS, options={"zipmap": zipmap}, target_opset=opsets)
    wanted = new[np.clip(1.2 * ROWS[:, 0] + 2.5, 0, 4).astype(int)]
    trainer = make(
        file,
        head=NEW[labels],
        loss="softmax_cross_entropy",
        optimizer="adam",
        learning_rate=0.05,
        epochs=20,
    )
    history = trainer.fit(ROWS, wanted)
    assert history["loss"][-1] < history["loss"][0]
    found, scores = models.predict(trainer.export(), {"X": ROWS}).values()
    if zipmap:
        assert list(scores[0]) == NEW[labels]
        scores = np.array([list(row.values()) for row in scores])
    assert scores.shape == (len(ROWS), 5)
    np.testing.assert_array_equal(found, new[scores.argmax(axis=1)])
    assert np.mean(found == wanted) > 0.4  # of five classes


# Pipelines that read strings ----------------------------------------------------------------------


LOSS = {"name": "log_loss", "on": "probabilities"}


def of_strings(encoder: Any, x: Array, y: Array, shape: list[Any]) -> onnx.ModelProto:
    """An encoder and a logistic regression that is hardly fitted."""
    from skl2onnx.common.data_types import StringTensorType

    pipeline = make_pipeline(encoder, LogisticRegression(max_iter=1)).fit(x, y)
    return skl2onnx.to_onnx(
        pipeline,
        initial_types=[("X", StringTensorType(shape))],
        options={"zipmap": False},
        target_opset=17,
        black_op={"LinearClassifier"},
    )


def categories() -> tuple[onnx.ModelProto, Array, Array]:
    rng = np.random.default_rng(0)
    x = rng.choice(["red", "green", "blue"], (200, 2))
    y = ((x[:, 0] == "red") | (x[:, 1] == "blue")).astype(int)
    return of_strings(OneHotEncoder(), x, y, [None, 2]), x, y


def sentences() -> tuple[onnx.ModelProto, Array, Array]:
    rng = np.random.default_rng(1)
    words = ["good", "bad", "film", "the", "nice", "awful"]
    x = np.array([" ".join(rng.choice(words, 5)) for _ in range(200)], object)
    y = np.array([int("good" in text) for text in x])
    return of_strings(TfidfVectorizer(lowercase=False), x, y, [None]), x, y


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [categories, sentences])
def test_a_pipeline_with_strings_trains(build: Any, tmp_path: Path) -> None:
    model, x, y = build()
    trainer = Trainer(
        model, loss=LOSS, epochs=30, learning_rate=0.5, progress=False, plugins=plugins()
    )
    before = trainer.evaluate(x, y)["loss"]
    trainer.fit(x, y, validation_data=0.2)
    after = trainer.evaluate(x, y)["loss"]
    assert after < min(0.25, before / 2)
    path = tmp_path / "trained.onnx"
    trainer.export(path)
    label, probabilities = models.predict(onnx.load(path), {"X": x.astype(object)}).values()
    mine = trainer.predict(x)
    np.testing.assert_allclose(mine["probabilities"], probabilities, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(mine["label"], label)
    expected = -np.log(np.clip(probabilities[np.arange(len(y)), y], 1e-12, None)).mean()
    assert after == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_the_prefix_is_the_encoder() -> None:
    model, *_ = sentences()
    trainer = Trainer(model, loss=LOSS, progress=False, plugins=plugins())
    prefix = internals_of(trainer).live.prefix
    assert prefix is not None
    assert [n.op_type for n in prefix.nodes] == [
        *("Tokenizer", "Flatten", "TfIdfVectorizer", "Mul", "Normalizer")
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_recipe_trains_strings_of_a_file(tmp_path: Path) -> None:
    model, x, y = categories()
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", X=x, y=y)
    (tmp_path / "train.toml").write_text(
        'model = "m.onnx"\ndata = "d.npz"\nvalidation = 0.2\nepochs = 20\nlearning_rate = 0.5\n'
        'cache = "memory"\n[loss]\nname = "log_loss"\non = "probabilities"\n'
    )
    recipe = Recipe.load(tmp_path / "train.toml", (), plugins())
    trainer = Trainer.from_recipe(recipe, plugins())
    assert recipe.run(trainer).losses[-1] < 0.2


@pytest.mark.filterwarnings("ignore")
def test_three_commands_train_a_pipeline_with_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of ``init`` has the loss that fits the probabilities of two classes."""
    model, x, y = categories()
    monkeypatch.chdir(tmp_path)
    onnx.save(model, "m.onnx")
    np.savez("d.npz", X=x.astype(str), y=y)
    for command in (
        ("init", "m.onnx", "--data", "d.npz"),
        ("train", "train.toml", "epochs=20", "learning_rate=0.5", 'output="run"'),
        ("predict", "run", "d.npz", "--output", "p.npz"),
    ):
        works(*command)
    with np.load("p.npz") as found:
        assert np.mean(found["probabilities"].argmax(axis=1) == y) > 0.95
