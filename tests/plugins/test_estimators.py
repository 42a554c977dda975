"""The estimators compared with scikit-learn's own: its checks, its scores, its habits."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("sklearn")

import joblib
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import ortflex_core
from ortflex_core import ModelError, Plugins
from ortflex_core.compiler.runtime import session
from ortflex_core.training.engines import timing
from ortflex_plugins.estimators import OrtClassifier, OrtRegressor, pipeline_to_onnx
from tests import models
from tests.training import plugins

quick: dict[str, Any] = {"max_iter": 30, "random_state": 0}
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@parametrize_with_checks([OrtRegressor(), OrtClassifier()])
@pytest.mark.sampled
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def data(name: str, seed: int) -> Any:
    load = {"diabetes": load_diabetes, "cancer": load_breast_cancer, "iris": load_iris}
    x, y = load.get(name, load_digits)(return_X_y=True)
    if name == "diabetes":
        y = (y - y.mean()) / y.std()
    split = train_test_split(x, y, random_state=seed, stratify=None if name == "diabetes" else y)
    scaler = StandardScaler().fit(split[0])
    return scaler.transform(split[0]), scaler.transform(split[1]), split[2], split[3]


@pytest.mark.parametrize("name", ["diabetes", "cancer", "digits", "iris"])
@pytest.mark.parametrize("seeds", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_scores_are_those_of_scikit_learns_perceptrons(name: str, seeds: int) -> None:
    ours, theirs = [], []
    for seed in range(seeds):
        train, test, y, held = data(name, seed)
        options = {"hidden_layer_sizes": (32,), "max_iter": 60, "random_state": seed}
        pair = (MLPClassifier, OrtClassifier)
        pair = (MLPRegressor, OrtRegressor) if name == "diabetes" else pair
        theirs.append(pair[0](**options).fit(train, y).score(test, held))
        ours.append(pair[1](**options).fit(train, y).score(test, held))
    assert np.mean(ours) >= np.mean(theirs) - (0.01 if seeds == 10 else 0.03)


def test_a_given_model_is_trained_and_its_file_does_not_change(tmp_path: Path) -> None:
    x, _, y, _ = data("iris", 0)
    path = tmp_path / "m.onnx"
    onnx.save(models.classifier(4, 3), path)
    before = path.read_bytes()
    clf = OrtClassifier(str(path), learning_rate=0.05, **quick).fit(x, y)
    assert clf.score(x, y) > 0.9
    assert path.read_bytes() == before
    np.testing.assert_allclose(clf.predict_proba(x).sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("labels", ["numbers", "texts", "two"])
def test_the_exported_model_says_the_same(labels: str, tmp_path: Path) -> None:
    x, _, y, _ = data("iris", 0)
    if labels == "texts":
        y = np.array(["setosa", "versicolor", "virginica"])[y]
    if labels == "two":
        y = (y == 2).astype(int)
    clf = OrtClassifier(**quick).fit(x, y)
    exported = clf.to_onnx(tmp_path / "m.onnx")
    made = models.predict(exported, {"X": x.astype(np.float32)})
    assert list(made["label"]) == list(clf.predict(x))
    np.testing.assert_allclose(made["probabilities"], clf.predict_proba(x), atol=1e-5)
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"))


@pytest.mark.parametrize("kind", ["regressor", "classifier"])
def test_a_whole_pipeline_exports(kind: str) -> None:
    pytest.importorskip("skl2onnx")
    x, _, y, _ = data("iris", 0)
    cls = OrtRegressor if kind == "regressor" else OrtClassifier
    pipeline = make_pipeline(StandardScaler(), cls(**quick)).fit(x, y)
    options = {} if kind == "regressor" else {"options": {"zipmap": False}}
    model = pipeline_to_onnx(pipeline, x.astype(np.float32), **options)
    made = models.predict(model, {"X": x.astype(np.float32)})
    if kind == "regressor":
        values = next(iter(made.values()))
        np.testing.assert_allclose(values.ravel(), pipeline.predict(x), rtol=1e-3, atol=1e-4)
    else:
        assert list(made["label"]) == list(pipeline.predict(x))
        np.testing.assert_allclose(made["probabilities"], pipeline.predict_proba(x), atol=1e-4)


def test_a_fitted_pipeline_is_fine_tuned_with_its_scaler_frozen() -> None:
    to_onnx = pytest.importorskip("skl2onnx").to_onnx
    x, _, y, _ = data("cancer", 0)
    x = (10 * x + 3).astype(np.float32)
    fitted = make_pipeline(StandardScaler(), MLPClassifier((8,), max_iter=3, random_state=0))
    fitted.fit(x, y)
    model = to_onnx(fitted, x[:1], options={"zipmap": False}, target_opset=17)
    before = fitted.score(x, y)
    clf = OrtClassifier(model, learning_rate=0.01, **quick).fit(x, y)
    assert clf.score(x, y) > max(before, 0.95)


def test_matrices_and_vectors_are_those_of_scikit_learn() -> None:
    """``coefs_`` has the matrices, ``intercepts_`` the vectors, in the order of the layers."""
    x, _, y, _ = data("iris", 0)
    ours = OrtRegressor(hidden_layer_sizes=(5, 2), **quick).fit(x, y)
    theirs = MLPRegressor(hidden_layer_sizes=(5, 2), max_iter=2).fit(x, y)
    for name in ("coefs_", "intercepts_"):
        shapes = [[a.shape for a in getattr(one, name)] for one in (ours, theirs)]
        assert shapes[0] == shapes[1], name


@pytest.mark.parametrize("cls", [OrtRegressor, OrtClassifier])
def test_copies_and_pickles_continue_where_they_were(cls: Any, tmp_path: Path) -> None:
    x, _, y, _ = data("iris", 0)
    first = cls(**quick).fit(x, y)
    joblib.dump(first, tmp_path / "e.joblib")
    others = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
    others.append(joblib.load(tmp_path / "e.joblib"))
    for other in others:
        np.testing.assert_array_equal(other.predict(x), first.predict(x))
    first.partial_fit(x, y)
    for other in others:
        other.partial_fit(x, y)
        for mine, theirs in zip(other.coefs_, first.coefs_, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert not hasattr(clone(first), "n_iter_")


def test_a_pickle_of_another_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _, y, _ = data("iris", 0)
    fitted = OrtRegressor(**quick).fit(x, y)
    wanted = fitted.predict(x)
    del fitted.options  # a parameter that came later
    with monkeypatch.context() as other:
        other.setattr(ortflex_core, "__version__", "0.0.1")
        kept = pickle.dumps(fitted)
    said = r"OrtRegressor was pickled by ortflex 0\.0\.1, and is read"
    with pytest.warns(UserWarning, match=said):
        read = pickle.loads(kept)
    np.testing.assert_array_equal(read.predict(x), wanted)
    assert read.get_params()["options"] is None
    read.partial_fit(x, y)


def test_a_second_fit_of_the_same_structure_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import onnxruntime

    made: list[int] = []
    real = onnxruntime.InferenceSession
    counting = lambda *a, **k: made.append(1) or real(*a, **k)  # noqa: E731
    monkeypatch.setattr(onnxruntime, "InferenceSession", counting)
    x, _, y, _ = data("iris", 0)
    OrtClassifier(hidden_layer_sizes=(11,), **quick).fit(x, y).predict(x)
    assert made
    made.clear()
    again = OrtClassifier(hidden_layer_sizes=(11,), learning_rate=0.03, alpha=0.1, max_iter=5)
    again.fit(x, y).predict(x)
    assert not made
    again.set_params(max_iter=3, random_state=0)
    GridSearchCV(again, {"alpha": [0.3]}, cv=3).fit(x, y)  # the sizes of the folds
    made.clear()
    grid = {"learning_rate": [0.01, 0.03], "alpha": [0.1, 0.2], "schedule": ["constant", "cosine"]}
    search = GridSearchCV(again, grid, cv=3, error_score="raise").fit(x, y)
    assert len(search.cv_results_["params"]) == 8
    assert not made


def test_grid_search_over_losses_and_schedules() -> None:
    x, _, y, _ = data("diabetes", 0)
    grid = {
        "loss": ["squared_error", "huber", {"name": "elastic", "l1_weight": 0.1}],
        "schedule": ["constant", "cosine"],
    }
    base = OrtRegressor(hidden_layer_sizes=(8,), learning_rate=0.02, max_iter=60, random_state=0)
    search = GridSearchCV(base, grid, cv=2).fit(x, y)
    assert search.best_score_ > 0.2
    assert len(search.cv_results_["params"]) == 6


def test_stopping_and_weights() -> None:
    x, _, y, _ = data("cancer", 0)
    early = OrtClassifier(early_stopping=True, max_iter=300, random_state=0).fit(x, y)
    assert early.n_iter_ == len(early.loss_curve_) == len(early.validation_scores_) < 300
    heavy = OrtClassifier(class_weight={0: 50.0, 1: 1.0}, **quick).fit(x, y)
    light = OrtClassifier(class_weight={0: 1.0, 1: 50.0}, **quick).fit(x, y)
    assert (heavy.predict(x) == 0).sum() > (light.predict(x) == 0).sum()
    warm = OrtClassifier(warm_start=True, max_iter=5, random_state=0).fit(x, y)
    loss = warm.loss_
    assert warm.fit(x, y).loss_curve_[0] < loss * 1.05
    with pytest.warns(ConvergenceWarning, match="12 epochs"):
        OrtClassifier(max_iter=12, tol=0.0, random_state=0).fit(x, y)


def test_what_does_not_fit_the_model_is_refused() -> None:
    x, _, y, _ = data("iris", 0)
    clf = OrtClassifier(**quick)
    with pytest.raises(NotFittedError):
        clf.to_onnx()
    two = np.stack([y, y], axis=1)
    refused: list[tuple[type[Exception], str, Any, Any, Any]] = [
        (ValueError, "only one class", clf, x, np.zeros(len(x))),
        (ModelError, "y has 3 classes, but", OrtClassifier(models.classifier(4, 5)), x, y),
        (ValueError, "X has 4 features, the model's X", OrtClassifier(models.classifier(5)), x, y),
        (ValueError, "activation: expected one of", OrtClassifier(activation="relx"), x, y),
        (ModelError, "y has 2 columns, the model's", OrtRegressor(models.linear(4)), x, two),
    ]
    for error, text, estimator, features, labels in refused:
        with pytest.raises(error, match=text):
            estimator.fit(features, labels)
    with pytest.raises(AttributeError, match="predict_proba"):
        OrtClassifier(loss="squared_error").predict_proba(x)


def test_a_search_measures_the_backends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds differ by a row, candidates in values that no graph has."""
    kept = [e for r in plugins() for e in r if e.kind != "backends" or e.name == "fused"]
    monkeypatch.setattr(Plugins, "discover", lambda: Plugins(kept))
    monkeypatch.setattr(session, "_cache", OrderedDict())
    measured: list[Any] = []
    measure = timing.measure

    def counted(*given: Any) -> Any:
        measured.append(given)
        return measure(*given)

    monkeypatch.setattr(timing, "measure", counted)
    x, y = load_iris(return_X_y=True)
    model = OrtClassifier(hidden_layer_sizes=(4,), max_iter=2, batch_size=10, backend="fastest")
    grid = {"alpha": [1e-4, 1e-2], "learning_rate": [0.01, 0.1]}
    search = GridSearchCV(model, grid, cv=3).fit(x[:-1], y[:-1])
    assert len(measured) == 1
    assert search.best_estimator_.predict(x).shape == (150,)


def test_a_prediction_draws_nothing_from_the_global_generator() -> None:
    """The first prediction after unpickling makes a Trainer, whose seed no result depends on."""
    x, y = load_iris(return_X_y=True)
    fitted = OrtClassifier(hidden_layer_sizes=(3,), max_iter=1).fit(x, y)
    again = pickle.loads(pickle.dumps(fitted))
    np.random.seed(0)
    before = np.random.rand()
    np.random.seed(0)
    again.predict(x)
    again.to_onnx()
    assert np.random.rand() == before


@pytest.mark.parametrize(
    ("ours", "theirs"), [(OrtClassifier, MLPClassifier), (OrtRegressor, MLPRegressor)]
)
def test_defaults_are_those_of_scikit_learn(ours: Any, theirs: Any) -> None:
    """Every parameter of the same name, but for the rate, which is the name of a schedule there."""
    mine, known = ours().get_params(), theirs().get_params()
    same = sorted(mine.keys() & known.keys() - {"learning_rate", "loss"})
    assert len(same) >= 12
    assert {n: mine[n] for n in same} == {n: known[n] for n in same}


@pytest.mark.parametrize("estimator", [OrtClassifier, OrtRegressor])
def test_parameters_are_given_by_name(estimator: Any) -> None:
    """All but the model, so that a new one may stand anywhere."""
    parameters = inspect.signature(estimator).parameters.values()
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ["model"]


# Pipelines around a model of the user, converted by skl2onnx ---------------------------------------

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


@pytest.fixture
def flowers() -> tuple[np.ndarray, np.ndarray]:
    """Data for a pipeline that skl2onnx converts."""
    pytest.importorskip("skl2onnx")
    x, y = load_iris(return_X_y=True)
    return x.astype(np.float32), y


@pytest.mark.parametrize("name", list(BODIES))
@pytest.mark.parametrize("cls", [OrtRegressor, OrtClassifier])
def test_models_of_other_opsets_and_of_images(flowers: Any, name: str, cls: Any) -> None:
    x, y = flowers
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


def test_an_opset_that_is_asked_for(flowers: Any) -> None:
    x, y = flowers
    new = make_pipeline(StandardScaler(), OrtRegressor(given("newer"), **SHORT)).fit(x, y)
    with pytest.raises(ModelError, match=r"has opset 18, .* opset 17; pass target_opset=18"):
        pipeline_to_onnx(new, x, target_opset=17)
    old = make_pipeline(StandardScaler(), OrtRegressor(given("older"), **SHORT)).fit(x, y)
    model = pipeline_to_onnx(old, x, target_opset=15)
    assert {o.domain: o.version for o in model.opset_import}[""] == 15
    [values] = models.predict(model, {"X": x}).values()
    np.testing.assert_allclose(values.ravel(), old.predict(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("classes", [2, 3])
def test_margins_take_the_place_of_probabilities(flowers: Any, classes: int) -> None:
    x, y = flowers
    y = y if classes == 3 else (y == 1).astype(int)
    pipeline = make_pipeline(StandardScaler(), OrtClassifier(loss="hinge", **SHORT)).fit(x, y)
    made = models.predict(pipeline_to_onnx(pipeline, x, options={"zipmap": False}), {"X": x})
    second = made["probabilities"] if classes == 3 else made["probabilities"][:, 1]
    np.testing.assert_allclose(second, pipeline.decision_function(x), atol=1e-4)
    np.testing.assert_array_equal(made["label"], pipeline.predict(x))


def test_errors_say_what_cannot_be_converted(flowers: Any) -> None:
    x, y = flowers
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


# Descent -----------------------------------------------------------------------------------------

# What scikit-learn's own defaults are, in our words: one row a step, a rate by rows.
ROWS: dict[str, Any] = {"batch_size": 1, "tol": 1e-3, "n_iter_no_change": 5, "max_iter": 100}
INVSCALING = {"name": "invscaling", "by": "rows"}
OPTIMAL = {"name": "optimal", "by": "rows"}


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("diabetes", 3),
        ("iris", 3),
        *(
            pytest.param(name, 10, marks=pytest.mark.slow)
            for name in ("diabetes", "cancer", "digits", "iris")
        ),
    ],
)
def test_scores_are_those_of_scikit_learns_descent(name: str, seeds: int) -> None:
    ours, theirs = [], []
    for seed in range(seeds):
        train, test, y, held = data(name, seed)
        options = {"optimizer": "sgd", "random_state": seed, **ROWS}
        if name == "diabetes":
            # Its squared error has a factor ½: here the rate is half of its own, and the penalty twice.
            twin = SGDRegressor(random_state=seed)
            rate = {"schedule": INVSCALING, "learning_rate": 0.005, "alpha": 2e-4}
            mine = OrtRegressor("linear", **rate, **options)
        else:
            twin = SGDClassifier(loss="log_loss", random_state=seed)
            mine = OrtClassifier("linear", schedule=OPTIMAL, **options)
        theirs.append(twin.fit(train, y).score(test, held))
        ours.append(mine.fit(train, y).score(test, held))
    assert np.mean(ours) >= np.mean(theirs) - (0.01 if seeds == 10 else 0.02)
