"""Estimators around models of all kinds: their shapes, their classes, losses next to the usual ones."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ortflex_core import ConfigError, DataError, ModelError, hook
from ortflex_plugins.estimators import OrtClassifier, OrtRegressor
from tests import models
from tests.training import Recorder

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
SHORT: dict[str, Any] = {"max_iter": 3, "random_state": 0}
RNG = np.random.default_rng(0)
WEIGHTS = {n: RNG.standard_normal((4, n)) for n in (1, 2, 3)}


def iris() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_iris(return_X_y=True)
    return (x - x.mean(axis=0)) / x.std(axis=0), y


def reshaped(into: list[Any], outputs: int, image: list[Any] | None = None) -> onnx.ModelProto:
    """x·W of rows, or of images, reshaped."""
    nodes = "rows = Reshape(x, flat) product = MatMul(rows, W) y = Reshape(product, last)"
    sizes = {"flat": np.array([-1, 4]), "last": np.array([-1, *into])}
    before, after = (", ".join(map(str, ["N", *dims])) for dims in (image or [4], into))
    ends = f"float[{before}] x", f"float[{after}] y"
    return models.parsed(nodes, {"W": WEIGHTS[outputs], **sizes}, *ends)


def fixed(rows: int) -> onnx.ModelProto:
    ends = f"float[{rows}, 4] x", f"float[{rows}, 1] y"
    return models.parsed("y = MatMul(x, W)", {"W": WEIGHTS[1]}, *ends)


@pytest.mark.parametrize(
    ("into", "outputs", "image"),
    [([], 1, None), ([1], 1, [1, 2, 2]), ([1, 3], 3, None)],
    ids=["a vector", "of images", "of rank 3"],
)
def test_regression_takes_the_shapes_that_models_have(
    into: list[Any], outputs: int, image: list[Any] | None
) -> None:
    x, y = iris()
    target = y if outputs == 1 else np.eye(3)[y]
    reg = OrtRegressor(reshaped(into, outputs, image), optimizer="sgd", learning_rate=1e-9, **SHORT)
    made = reg.fit(x, target).predict(x)
    assert made.shape == target.shape
    wanted = (x @ WEIGHTS[outputs]).reshape(target.shape)
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-4)


def test_two_classes_by_a_vector_of_scores() -> None:
    x, y = iris()
    clf = OrtClassifier(reshaped([], 1), learning_rate=0.1, max_iter=50, random_state=0)
    clf.fit(x, y == 0)
    assert clf.score(x, y == 0) > 0.95
    made = models.predict(clf.to_onnx(), {"x": x.astype(np.float32)})
    np.testing.assert_allclose(made["probabilities"], clf.predict_proba(x), atol=1e-5)
    np.testing.assert_array_equal(made["label"], clf.predict(x))


def test_a_fixed_batch_is_freed_by_an_option_and_stays_so() -> None:
    x, y = iris()
    with pytest.raises(DataError, match="fixed batch dimension"):
        OrtRegressor(fixed(1), **SHORT).fit(x, y)
    reg = OrtRegressor(fixed(1), options={"free_batch": True}, **SHORT).fit(x, y)
    again = pickle.loads(pickle.dumps(reg))
    np.testing.assert_array_equal(again.predict(x), reg.predict(x))


# ---------------------------------------------------------------------- what a file says of classes


@pytest.mark.parametrize("zipmap", [True, False])
def test_a_fitted_pipeline_keeps_its_preprocessing_and_its_labels(zipmap: bool) -> None:
    to_onnx = pytest.importorskip("skl2onnx").to_onnx
    x, y = iris()
    x, names = (3 * x + 2).astype(np.float32), np.array(["setosa", "versicolor", "virginica"])[y]
    steps = StandardScaler(), MLPClassifier((8,), max_iter=20, random_state=0)
    fitted = make_pipeline(*steps).fit(x, names)
    model = to_onnx(fitted, x[:1], options={"zipmap": zipmap}, target_opset=17)
    clf = OrtClassifier(model, learning_rate=0.02, max_iter=40, random_state=0).fit(x, names)
    assert clf.score(x, names) > max(0.9, fitted.score(x, names))
    out = clf.to_onnx()
    assert [o.name for o in out.graph.output] == ["label", "probabilities"]
    assert list(models.predict(out, {"X": x})["label"]) == list(clf.predict(x))
    before, after = (
        [n.SerializeToString() for n in m.graph.node if n.op_type == "Scaler"] for m in (model, out)
    )
    assert before == after
    assert len(before) == 1
    old, new = models.weights_of(model), models.weights_of(out)
    moved = {n for n in set(old) & set(new) if not np.array_equal(old[n], new[n])}
    assert moved == {"coefficient", "intercepts", "coefficient1", "intercepts1"}


def test_classes_in_another_order_than_scikit_learns_are_refused() -> None:
    x, y = iris()
    nodes = """
        product = MatMul(X, W) scores = Add(product, b) probabilities = Softmax<axis = 1>(scores)
        best = ArgMax<axis = 1, keepdims = 0>(probabilities)
        label = ai.onnx.ml.ArrayFeatureExtractor(names, best)
    """
    weights = {**models.weights_of(models.classifier()), "names": np.array([2, 1, 0])}
    ends = "float[N, 4] X", "float[N, 3] probabilities, int64[1, N] label"
    model = models.parsed(nodes, weights, *ends, ai_onnx_ml=2)
    with pytest.raises(ModelError, match=re.escape("the classes [2, 1, 0], in this order")):
        OrtClassifier(model, **SHORT).fit(x, y)
    # Other labels than the file's are the user's own: by place.
    assert OrtClassifier(model, **SHORT).fit(x, y + 5).classes_.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("fitted", "classes", "scores"),
    [
        (SGDClassifier(loss="log_loss", random_state=0), 3, "score"),
        (LogisticRegression(), 2, "raw_scores"),
    ],
)
def test_probabilities_without_a_softmax_are_no_scores(
    fitted: Any, classes: int, scores: str
) -> None:
    to_onnx = pytest.importorskip("skl2onnx").to_onnx
    x, y = iris()
    x, y = x.astype(np.float32), y if classes == 3 else (y == 0).astype(int)
    fitted.fit(x, y)
    options: dict[str, Any] = {"options": {"zipmap": False}, "target_opset": 17}
    model = to_onnx(fitted, x[:1], black_op={"LinearClassifier"}, **options)
    said = r"sums to 1|has normalized scores, x / Σ x"
    with pytest.raises((ModelError, ConfigError), match=said):
        OrtClassifier(model, **SHORT).fit(x, y)
    still: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1e-9, "max_iter": 1}
    clf = OrtClassifier(model, loss={scores: "log_loss"}, **still)
    clf.fit(x, y)
    np.testing.assert_allclose(clf.predict_proba(x), fitted.predict_proba(x), atol=1e-4)


def test_numbers_that_add_up_to_one_are_no_scores() -> None:
    x, y = iris()
    nodes = """product = MatMul(X, W) scores = Add(product, b) powers = Exp(scores)
        shares = LpNormalization<axis = 1, p = 1>(powers)"""
    weights = models.weights_of(models.classifier())
    model = models.parsed(nodes, weights, "float[N, 4] X", "float[N, 3] shares")
    with pytest.raises(ModelError, match=r"'shares' sums to 1, .* loss={'scores': 'log_loss'}"):
        OrtClassifier(model, **SHORT).fit(x, y)


# ---------------------------------------------------------------------- losses


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    "loss",
    ["hinge", "squared_hinge", "log_loss", "softmax_cross_entropy", "squared_error", "focal"],
)
def test_losses_of_every_kind_train_classifiers(loss: str, classes: int) -> None:
    x, y = iris()
    y = y if classes == 3 else (y == 0).astype(int)
    clf = OrtClassifier("linear", loss=loss, learning_rate=0.05, max_iter=100, random_state=0)
    clf.fit(x, y)
    assert clf.score(x, y) > (0.97 if classes == 2 else 0.8)
    made = models.predict(clf.to_onnx(), {"X": x.astype(np.float32)})
    assert list(made["label"]) == list(clf.predict(x))
    if loss in ("log_loss", "softmax_cross_entropy"):
        np.testing.assert_allclose(made["probabilities"], clf.predict_proba(x), atol=1e-5)
        np.testing.assert_allclose(made["probabilities"].sum(axis=1), 1, rtol=1e-5)
    else:
        assert not hasattr(clf, "predict_proba")
        margins = clf.decision_function(x)
        found = made["margins"] if classes == 3 else made["margins"][:, 1]
        np.testing.assert_allclose(found, margins, atol=1e-4)


def test_each_class_against_the_rest_is_scikit_learns_hinge() -> None:
    x, y = iris()
    options: dict[str, Any] = {"random_state": 0, "max_iter": 300, "alpha": 1e-2}
    theirs = SGDClassifier(tol=None, **options).fit(x, y)
    ours = OrtClassifier("linear", loss="hinge", learning_rate=0.01, batch_size=10, **options)
    ours.fit(x, y)
    assert abs(ours.score(x, y) - theirs.score(x, y)) < 0.05


# ---------------------------------------------------------------------- what rows count


@pytest.mark.parametrize("weights", ["balanced", {0: 5.0, 2: 0.5}])
def test_class_weights_are_sample_weights(weights: Any) -> None:
    x, y = iris()
    x, y = x[20:], y[20:]
    options: dict[str, Any] = {"max_iter": 20, "random_state": 0}
    rows = {
        c: len(y) / (3 * np.sum(y == c)) if weights == "balanced" else weights.get(c, 1)
        for c in range(3)
    }
    each = np.array([rows[c] for c in y])
    own = np.linspace(0.5, 1.5, len(y))
    one = OrtClassifier("linear", class_weight=weights, **options).fit(x, y, own)
    two = OrtClassifier("linear", **options).fit(x, y, own * each)
    np.testing.assert_allclose(one.coefs_[0], two.coefs_[0], rtol=1e-9)


def test_class_weights_when_rows_come_bit_by_bit() -> None:
    x, y = iris()
    options: dict[str, Any] = {"random_state": 0, "learning_rate": 0.1}
    parts = [y == 0, y == 2, y == 1]
    one = OrtClassifier("linear", class_weight={0: 5.0, 1: 2.0}, **options)
    two = OrtClassifier("linear", **options)
    for part in parts:
        one.partial_fit(x[part], y[part], classes=[0, 1, 2])
        two.partial_fit(x[part], y[part], [0, 1, 2], np.choose(y[part], [5.0, 2.0, 1.0]))
    np.testing.assert_allclose(one.coefs_[0], two.coefs_[0], rtol=1e-9)
    with pytest.raises(ValueError, match="'balanced' is not supported by partial_fit"):
        OrtClassifier(class_weight="balanced").partial_fit(x, y, [0, 1, 2])
    with pytest.raises(ValueError, match="class_weight: expected numbers >= 0"):
        OrtClassifier(class_weight={0: -1.0, 1: 1.0}, **SHORT).fit(x, y)


def test_early_stopping_goes_back_to_the_best_rows_held_out() -> None:
    x, y = iris()
    early = {"early_stopping": True, "validation_fraction": 0.3, "max_iter": 60}
    clf = OrtClassifier(models.classifier(), learning_rate=0.3, random_state=0, **early).fit(x, y)
    drawn: dict[str, Any] = {"random_state": np.random.RandomState(0), "stratify": y}
    _, held = train_test_split(np.arange(len(y)), test_size=0.3, **drawn)
    assert clf.score(x[held], y[held]) == max(clf.validation_scores_)
    assert clf.n_iter_ == len(clf.validation_scores_) < 60
    assert clf.best_loss_ is None


def test_early_stopping_goes_back_to_the_statistics_of_that_epoch_too() -> None:
    """Weights of one epoch with running statistics of another are a network that was never scored."""
    x, y = iris()
    nodes = "n = BatchNormalization<momentum = 0.2>(x, g, c, m, v) p = MatMul(n, w) y = Add(p, b)"
    weights = {name: np.full(4, value) for name, value in zip("gcmv", (1, 0, 0, 1), strict=True)}
    weights |= {"b": np.zeros(3), "w": np.random.default_rng(1).standard_normal((4, 3))}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    model = models.parsed(nodes, weights, "float[N, 4] x", "float[N, 3] y")
    seen: list[Any] = []

    class Look:
        @hook
        def epoch_end(self, trainer: Any) -> None:
            seen.append(trainer.get_state(buffers=True))

    options: Any = {"early_stopping": True, "n_iter_no_change": 4, "callbacks": [Look()]}
    clf = OrtClassifier(model, learning_rate=0.5, batch_size=30, random_state=0, **options)
    clf.fit(x, y)
    best = int(np.argmax(clf.validation_scores_))
    assert best < len(seen) - 1
    left = clf._cached_trainer.get_state(buffers=True)
    assert set(left) >= {"m", "v", "w"}
    for name, array in left.items():
        np.testing.assert_array_equal(array, seen[best][name], err_msg=name)
        assert not np.array_equal(array, seen[-1][name]), name


@pytest.mark.parametrize(("rows", "steps"), [(150, 1), (450, 3)])
def test_the_default_batch_is_200_rows_at_most(rows: int, steps: int) -> None:
    x, y = iris()
    x, y = np.tile(x, (3, 1))[:rows], np.tile(y, 3)[:rows]
    seen = Recorder()
    OrtClassifier("linear", callbacks=[seen], **SHORT).fit(x, y)
    assert len(seen.all("step_end")) == 3 * steps


# ---------------------------------------------------------------------- mistakes


def test_mistakes_are_value_errors_that_name_them() -> None:
    x, y = iris()

    def fails(text: str, kind: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            OrtClassifier(**{**SHORT, **options}).fit(x, y)

    fails("unknown loss 'hinje'; did you mean 'hinge'", ConfigError, loss="hinje")
    fails("unknown optimizer 'adm'; did you mean 'adam'", ConfigError, optimizer="adm")
    fails("unknown argument 'clipnorm'; did you mean 'clip_norm'", options={"clipnorm": 1.0})
    fails("'loss' is set by the estimator's own parameters", options={"loss": "hinge"})
    fails("expected a mapping of arguments", options=["clip_norm"])
    fails("early_stopping: expected True or False, got 'no'", early_stopping="no")
    fails("there is no such file; did you mean 'linear'", ModelError, model="linaer")
    fails("expected the path of a file, .* got 7", ModelError, model=7)
    fails(r"got \(16,\); .* write hidden_layer_sizes=\(16,\)", ModelError, model=(16,))
    fails("an estimator has one loss, got 2", loss=["hinge", "log_loss"])
    with pytest.raises(ValueError, match="y mixes labels of the types NoneType, int, str"):
        OrtClassifier(**SHORT).fit(x, np.array(["a", 1, None], dtype=object)[y])
    with pytest.raises(ValueError, match=r"at least 2 classes .* only one class: 0"):
        OrtClassifier(**SHORT).partial_fit(x[:50], y[:50], classes=[0])


def test_numbers_that_the_models_type_cannot_hold() -> None:
    x, y = iris()
    single = OrtRegressor(precision="float32", **SHORT)
    with pytest.raises(DataError, match=r"X has .*e\+300 in row 3, column 1, which X: float32"):
        single.fit(np.where(np.arange(600).reshape(150, 4) == 13, 1e300, x), y)
    said = r"y has .*e\+300 in row 7, column 0, which scores: float32"
    with pytest.raises(DataError, match=said):
        single.fit(x, np.where(np.arange(150) == 7, 1e300, y))
    ends = "int64[N, 4] ids", "float[N, 1] y"
    ids = models.parsed("x = Cast<to = 1>(ids) y = MatMul(x, W)", {"W": WEIGHTS[1]}, *ends)
    with pytest.raises(DataError, match=r"X has 0\.5 in row 0, column 0, which ids: int64\[N, 4\]"):
        OrtRegressor(ids, **SHORT).fit(np.full((9, 4), 0.5), np.zeros(9))
    assert OrtRegressor(ids, **SHORT).fit(np.ones((9, 4)), np.zeros(9)).n_iter_ == 3
    mean = "z = MatMul(x, W) y = ReduceMean<keepdims = 0>(z)"
    total = models.parsed(mean, {"W": WEIGHTS[1]}, "float[N, 4] x", "float y")
    with pytest.raises(ModelError, match="'y' has one number for all rows; expected one per row"):
        OrtRegressor(total, **SHORT).fit(x, y)


# ---------------------------------------------------------------------- new heads, and teachers

DRAWS = np.random.default_rng(4)
X = DRAWS.standard_normal((120, 4)).astype(np.float32)
Y = np.array(list("abcde"))[(X @ DRAWS.standard_normal((4, 5))).argmax(1)]


def classifier(**options: Any) -> Any:
    settings = {"optimizer": "adam", "learning_rate": 0.1, "max_iter": 60, "n_iter_no_change": 99}
    return OrtClassifier(models.classifier(), random_state=3, **settings, **options)


@pytest.mark.parametrize("head", [5, list("abcde")])
def test_a_new_head_fits_clones_and_pickles(head: Any) -> None:
    options = {"head": head, "freeze": "backbone"}
    made = classifier(loss="softmax_cross_entropy", options=options)
    first, second = clone(made).fit(X, Y), clone(made).fit(X, Y)
    assert first.score(X, Y) > 0.8
    scores = first.predict_proba(X)
    assert scores.shape == (120, 5)
    np.testing.assert_array_equal(scores, second.predict_proba(X))
    np.testing.assert_array_equal(scores, pickle.loads(pickle.dumps(first)).predict_proba(X))
    again = pickle.loads(pickle.dumps(first)).partial_fit(X, Y)
    assert again.score(X, Y) > 0.8


def test_another_number_of_classes_names_the_head() -> None:
    with pytest.raises(ModelError, match="'head': 5"):
        classifier(loss="softmax_cross_entropy").fit(X, Y)
    with pytest.raises(ModelError, match="nowhere"):
        classifier(options={"head": {"outputs": 5, "at": "nowhere"}}).fit(X, Y)


def test_a_teacher_of_an_estimator(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    onnx.save(models.classifier(seed=7), path)
    wanted = models.predict(models.classifier(seed=7), {"X": X})["probabilities"]
    loss = {"name": "distillation", "teacher": str(path), "alpha": 1.0, "temperature": 1.0}
    made = classifier(loss=loss).fit(X, wanted.argmax(1))
    found = made.predict_proba(X)
    assert np.abs(found - wanted).max() < 0.05
