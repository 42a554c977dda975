"""Metrics against scikit-learn's, batch by batch and weighted; scikit-learn's own by their names."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from ortflex_core import ConfigError, DataError, Metric, Recipe, Trainer, internals_of
from ortflex_plugins.metrics.classification import F1, Accuracy, RocAuc, TopK
from ortflex_plugins.metrics.regression import R2, MeanAbsoluteError, RootMeanSquaredError
from ortflex_plugins.metrics.sklearn import SklearnMetric
from tests import models
from tests.training import make, plugins, regression

REGRESSION = [
    (MeanAbsoluteError(), "mean_absolute_error"),
    (RootMeanSquaredError(), "root_mean_squared_error"),
    (R2(), "r2_score"),
]
ALL = [*(metric for metric, _ in REGRESSION), Accuracy()]


def streamed(metric: Metric, expected: Any, predicted: Any, weight: Any, batch: int = 7) -> float:
    state = metric.start()
    for k in range(0, len(expected), batch):
        part = slice(k, k + batch)
        state.update(expected[part], predicted[part], None if weight is None else weight[part])
    return state.result()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 3)])
@pytest.mark.parametrize(("metric", "theirs"), REGRESSION, ids=lambda m: getattr(m, "name", ""))
def test_regression_metrics_are_scikit_learn_s(
    metric: Metric, theirs: str, shape: tuple[int, ...], weighted: bool
) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    y = rng.normal(size=shape).astype(np.float32)
    y = y * np.float32([1.0, 5.0, 0.1][: shape[1]]) if len(shape) == 2 else y
    p = y + rng.normal(size=shape).astype(np.float32)
    weight = rng.uniform(0, 3, 50) if weighted else None
    wanted = getattr(metrics, theirs)(y.astype(float), p.astype(float), sample_weight=weight)
    for batch in (1, 7, 50):
        assert streamed(metric, y, p, weight, batch) == pytest.approx(wanted, rel=1e-12)


def test_r2_of_labels_that_hardly_vary_is_scikit_learn_s() -> None:
    """Of a large mean, and of none at all."""
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    y = 1e7 + rng.normal(size=1000)
    p = y + 0.1 * rng.normal(size=1000)
    assert streamed(R2(), y, p, None) == pytest.approx(metrics.r2_score(y, p), rel=1e-8)
    y = np.ones((4, 2))
    p = y + np.array([0.0, 0.5])
    assert streamed(R2(), y, p, None, batch=4) == metrics.r2_score(y, p) == 0.5


@pytest.mark.parametrize("weighted", [False, True])
def test_accuracy_is_scikit_learn_s_in_every_form_of_the_predictions(weighted: bool) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    weight = rng.uniform(0, 3, 60) if weighted else None
    scores = rng.normal(size=(60, 3)).astype(np.float32)
    classes = scores.argmax(axis=1)
    y = np.where(rng.random(60) < 0.7, classes, rng.integers(0, 3, 60))
    wanted = metrics.accuracy_score(y, classes, sample_weight=weight)
    names = np.array(["ant", "bee", "cat"])
    for expected, predicted in (
        (y, scores),
        (y.astype(np.uint8), scores),
        (np.eye(3)[y], scores),
        (y, classes),
        (names[y], names[classes]),
        (names[y].astype(object), names[classes]),
    ):
        assert streamed(Accuracy(), expected, predicted, weight) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("shape", [(60,), (60, 1)])
def test_binary_accuracy_has_a_threshold(shape: tuple[int, ...]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    raw = rng.normal(size=shape)
    y = rng.integers(0, 2, shape)
    wanted = metrics.accuracy_score(y, raw > 0)
    assert streamed(Accuracy(threshold=0), y, raw, None) == pytest.approx(wanted)
    assert streamed(Accuracy(), y * 1.0, 1 / (1 + np.exp(-raw)), None) == pytest.approx(wanted)


def test_accuracy_counts_every_position() -> None:
    scores = np.zeros((2, 3, 4))
    scores[:, 1] = 1
    y = np.ones((2, 4), dtype=int)
    y[0, :2] = 2
    assert streamed(Accuracy(), y, scores, None) == 0.75
    weighted = streamed(Accuracy(), y, scores, np.array([1.0, 3.0]))
    assert weighted == pytest.approx((0.5 * 1 + 1.0 * 3) / 4)


@pytest.mark.parametrize("metric", ALL, ids=lambda m: m.name)
def test_shapes_are_never_broadcast(metric: Metric) -> None:
    with pytest.raises(DataError, match=rf"{metric.name}: labels \[4\] and predictions \[4, 1\]"):
        metric.start().update(np.zeros(4), np.zeros((4, 1)), None)
    with pytest.raises(DataError, match=rf"{metric.name}: sample weights \[3.*fit.*\[4, 1\]"):
        metric.start().update(np.zeros((4, 1)), np.zeros((4, 1)), np.ones(3))


@pytest.mark.parametrize(
    ("expected", "predicted", "text"),
    [
        (["a", "b"], np.zeros((2, 3)), "class names become numbers by classes="),
        (["a", "b"], [0, 1], "cannot equal predictions of type int64"),
        ([[0, 1], [1, 1]], np.zeros((2, 2)), "must be one-hot, but row 1 sums to 2"),
        ([[0], [0]], np.zeros((2, 3)), r"need labels of shape \[2\], or one-hot \[2, 3\], got"),
        ([[0.25], [1.0]], np.zeros((2, 1)), r"class indices, but 1 of 2 .* first is 0\.25"),
        ([0.25, 1.0], np.zeros((2, 2)), r"class indices, but 1 of 2 .* first is 0\.25"),
    ],
)
def test_accuracy_refuses_what_it_cannot_compare(expected: Any, predicted: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        Accuracy().start().update(np.array(expected), np.array(predicted), None)


CLASS_SCORES = np.array([[2.0, 1.0, -np.inf], [0.1, 0.2, 0.7], [0.3, 0.5, 0.2]])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, {}) for name in ("accuracy", "roc_auc", "mae", "rmse", "r2")),
        ("f1", {"average": "macro"}),
        ("top_k", {"k": 2}),
        ("sklearn.accuracy_score", {}),
        ("sklearn.r2_score", {}),
        ("sklearn.f1_score", {"average": "macro"}),
        ("sklearn.roc_auc_score", {"multi_class": "ovr"}),
    ],
)
def test_nan_and_infinity_make_the_result_nan(name: str, given: Any, wrong: float) -> None:
    """The class of errors: an ordinary number computed from NaN or ∞, whole or streamed."""
    metric = plugins().component("metrics", {"name": name, **given})
    labels, scores = np.array([0, 1, 2, 1, 0, 2]), np.tile(CLASS_SCORES, (2, 1))
    scores[scores == -np.inf] = 0
    scores /= scores.sum(axis=1, keepdims=True)
    if name in ("mae", "rmse", "r2", "sklearn.r2_score"):
        labels, scores = labels[:, None].astype(float), scores[:, :1]
    for batch in (6, 3):
        assert np.isfinite(streamed(metric, labels, scores, None, batch))
        bad = scores.copy()
        bad[0] = wrong
        assert np.isnan(streamed(metric, labels, bad, None, batch))


def test_the_score_of_a_masked_class_may_be_minus_infinity() -> None:
    state = plugins().component("metrics", "accuracy").start()
    state.update(np.array([0, 2, 0]), CLASS_SCORES, None)
    assert state.result() == pytest.approx(2 / 3)


def softmax(scores: Any) -> Any:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def labeled(classes: int, rows: int = 60) -> tuple[Any, Any, Any]:
    """Scores, labels that they say something about, and weights."""
    rng = np.random.default_rng(classes)
    scores = rng.normal(size=(rows, classes)).astype(np.float32)
    right = scores.argmax(axis=1)
    labels = np.where(rng.random(rows) < 0.6, right, rng.integers(0, classes, rows))
    return scores, labels, rng.uniform(0, 3, rows)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_top_k_is_scikit_learn_s(k: int, weighted: bool) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels, weight = labeled(4)
    scores[5] = scores[5, 0]  # equal ones
    scores[7, 1:3] = scores[7, 3]
    weight = weight if weighted else None
    wanted = 1.0
    if k <= 3:
        options = {"labels": range(4), "sample_weight": weight}
        wanted = metrics.top_k_accuracy_score(labels, scores, k=k, **options)
    for expected in (labels, np.eye(4)[labels]):
        assert streamed(TopK(k=k), expected, scores, weight) == pytest.approx(wanted)


def test_top_k_counts_every_position() -> None:
    scores = np.zeros((2, 3, 4))
    scores[:, 1], scores[:, 2] = 1, 2
    labels = np.ones((2, 4), dtype=int)
    labels[0, 0] = 0
    assert streamed(TopK(k=2), labels, scores, None) == 7 / 8
    assert streamed(TopK(k=1), labels, scores, None) == 0
    with pytest.raises(DataError, match=r"expects scores \[B, C, …\] of several classes, got"):
        TopK().start().update(np.zeros(3), np.zeros(3), None)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
def test_f1_is_scikit_learn_s(average: Any, weighted: bool) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels, weight = labeled(5)
    scores[:, 4] = -9  # a class that is never predicted
    labels[labels == 3] = 2  # and one that has no label
    found, weight = scores.argmax(axis=1), weight if weighted else None
    wanted = metrics.f1_score(labels, found, average=average, sample_weight=weight, zero_division=0)
    names = np.array(["ant", "bee", "cat", "dog", "eel"])
    for expected, predicted in ((labels, scores), (labels, found), (names[labels], names[found])):
        got = streamed(F1(average=average), expected, predicted, weight)
        assert got == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("shape", [(60,), (60, 1)])
def test_f1_of_two_classes_is_scikit_learn_s(shape: Any) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels, weight = labeled(2)
    raw, y = (scores[:, 1] - scores[:, 0]).reshape(shape), labels.reshape(shape)
    for positive in (0, 1):
        wanted = metrics.f1_score(labels, raw.ravel() > 0, pos_label=positive, sample_weight=weight)
        got = streamed(F1(threshold=0, positive=positive), y, raw, weight)
        assert got == pytest.approx(wanted, rel=1e-12)
        of_columns = streamed(F1(positive=positive), labels, scores, weight)
        assert of_columns == pytest.approx(wanted, rel=1e-12)
    nobody = np.zeros(4)
    assert streamed(F1(), nobody, nobody, None) == 0


def test_f1_of_many_classes_needs_an_average() -> None:
    state = F1().start()
    with pytest.raises(DataError, match=r"needs two classes, got 0, 1, 2, …; choose average="):
        state.update(np.array([0, 1, 2]), np.eye(3), None)
    with pytest.raises(ValueError, match=r"F1.average must be one of 'binary', 'macro'"):
        F1(average="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("weighted", [False, True])
def test_roc_auc_is_scikit_learn_s(weighted: bool) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels, weight = labeled(2)
    raw = np.round(scores[:, 1] - scores[:, 0], 1)  # some are equal
    weight = weight if weighted else None
    wanted = metrics.roc_auc_score(labels, raw, sample_weight=weight)
    both = np.stack([np.zeros(60), raw], axis=1)
    for expected, predicted in (
        (labels, raw),
        (labels.reshape(-1, 1), raw.reshape(-1, 1)),
        (labels * 1.0, 1 / (1 + np.exp(-raw))),
        (labels, both),
        (labels, softmax(both)),
        (np.eye(2)[labels], both),
    ):
        got = streamed(RocAuc(), expected, predicted, weight)
        assert got == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("average", ["macro", "weighted"])
def test_roc_auc_of_several_classes_is_scikit_learn_s(average: Any) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels, weight = labeled(4)
    shares = softmax(scores.astype(float))
    wanted = metrics.roc_auc_score(labels, shares, multi_class="ovr", average=average)
    for expected in (labels, np.eye(4)[labels]):
        assert streamed(RocAuc(average=average), expected, shares, None) == pytest.approx(wanted)
    several = (np.random.default_rng(0).random((60, 4)) < 0.4) * 1.0
    wanted = metrics.roc_auc_score(several, shares, average=average, sample_weight=weight)
    assert streamed(RocAuc(average=average), several, shares, weight) == pytest.approx(wanted)


def test_roc_auc_says_what_it_cannot_judge() -> None:
    assert math.isnan(streamed(RocAuc(), np.ones(4), np.arange(4.0), None))
    for expected, predicted, text in (
        ([0, 2], np.arange(2.0), "labels must be 0 and 1, got"),
        ([0, 3], np.eye(3)[:2], r"predictions \[2, 3\] have no class"),
        ([0, 1], np.array([0, 1]), "expects scores or probabilities, got int64"),
    ):
        with pytest.raises(DataError, match=text):
            streamed(RocAuc(), np.array(expected), predicted, None)


OF_CLASSES = [F1(), TopK(), RocAuc()]
LABELED = np.array([0, 1, 1]), np.array([[0.2, 0.8], [0.3, 0.7], [0.6, 0.4]])


@pytest.mark.parametrize("metric", [*ALL, *OF_CLASSES], ids=lambda m: m.name)
def test_of_nothing_a_metric_is_nan(metric: Metric) -> None:
    assert math.isnan(metric.start().result())
    given = LABELED if metric in OF_CLASSES else (np.zeros(3), np.zeros(3))
    assert math.isnan(streamed(metric, *given, np.zeros(3)))


@pytest.mark.parametrize("metric", OF_CLASSES, ids=lambda m: m.name)
def test_labels_and_weights_of_metrics_of_classes_must_fit(metric: Metric) -> None:
    labels, scores = LABELED
    assert metric.better == "higher"
    with pytest.raises(DataError, match=rf"{metric.name}: sample weights \[2\] do not fit"):
        metric.start().update(labels, scores, np.ones(2))
    with pytest.raises(DataError, match=rf"{metric.name}: predictions \[3, 2\] need labels"):
        metric.start().update(np.zeros((3, 1), int), scores, None)


FORMS = {
    "one": ("[N, 1]", "Y = Identity(p)", {}),
    "flat": ("[N]", "Y = Reshape(p, all)", {"all": [-1]}),
    "columns": ("[N, 2]", "q = Sub(one, p) Y = Concat<axis = 1>(q, p)", {"one": [1.0]}),
}


def binary_model(form: str) -> Any:
    """``Y``: the probability of class 1, in three forms, of scores ``X @ W + b``."""
    shape, last, more = FORMS[form]
    text = f"product = MatMul(X, W) scores = Add(product, b) p = Sigmoid(scores) {last}"
    weights = {"W": [[1.0], [-1.0]], "b": [0.3], **more}
    return models.of_text(f"(float[N, 2] X) => (float{shape} Y) {{ {text} }}", weights)


@pytest.mark.parametrize("form", FORMS)
def test_metrics_see_the_probabilities_that_the_file_puts_out(form: str) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 2)).astype(np.float32)
    y = (x[:, 0] - x[:, 1] + rng.normal(size=50) > 0).astype(np.int64).reshape(-1, 1)
    raw = x @ np.array([[1.0], [-1.0]]) + 0.3
    asked = ["accuracy", "f1", "roc_auc", "sklearn.recall_score", "sklearn.log_loss"]
    trainer = make(binary_model(form), loss="log_loss", metrics=asked, classes=None)
    found = trainer.evaluate(x, y)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(y, raw > 0))
    assert found["f1"] == pytest.approx(metrics.f1_score(y, raw > 0))
    assert found["roc_auc"] == pytest.approx(metrics.roc_auc_score(y, raw))
    assert found["sklearn.recall_score"] == pytest.approx(metrics.recall_score(y, raw > 0))
    assert found["sklearn.log_loss"] == pytest.approx(found["loss"], rel=1e-5)


def judged(
    name: str, expected: Any, predicted: Any, seen: Any, weight: Any, **arguments: Any
) -> None:
    """The metric of predictions is scikit-learn's of what it is to see of them."""
    metrics = pytest.importorskip("sklearn.metrics")
    got = streamed(SklearnMetric(score=name, arguments=arguments), expected, predicted, weight)
    options = arguments if weight is None else arguments | {"sample_weight": weight}
    assert got == pytest.approx(getattr(metrics, name)(expected.squeeze(), seen, **options))


def test_every_score_of_scikit_learn_can_be_named() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    positive, predicted = rng.uniform(1, 2, 60), rng.uniform(1, 2, 60)
    scores, labels, weight = labeled(3)
    shares = softmax(scores.astype(float))
    several = (rng.random((60, 3)) < 0.5) * 1.0
    every = {n: getattr(getattr(metrics, n), "__module__", "") for n in metrics.__all__}
    of_regression = [n for n, module in every.items() if "regression" in module and n.islower()]
    assert len(of_regression) > 12
    for name in of_regression:
        arguments = {"power": 1.5} if "tweedie" in name else {}
        judged(name, positive, predicted, predicted, None, **arguments)
    best = scores.argmax(axis=1)
    for name in ("accuracy_score", "balanced_accuracy_score", "hamming_loss", "zero_one_loss"):
        judged(name, labels, shares, best, weight)
    for name in ("cohen_kappa_score", "matthews_corrcoef", "adjusted_rand_score"):
        judged(name, labels, shares, best, None)
    for name in ("f1_score", "jaccard_score", "precision_score", "recall_score"):
        judged(name, labels, shares, best, weight, average="macro")
        judged(name, several, shares, shares > 0.5, weight, average="macro")
    judged("log_loss", labels, shares, shares, weight)
    log_loss = SklearnMetric(score="log_loss")
    assert math.isfinite(streamed(log_loss, labels[labels < 2], shares[labels < 2], None))
    judged("roc_auc_score", labels, shares, shares, None, multi_class="ovo")
    judged("label_ranking_loss", several, shares, shares, None)
    two, y, _ = labeled(2)
    raw = (two[:, 1].astype(float) - two[:, 0]).reshape(-1, 1)
    for expected, seen in ((y, two), (y, softmax(two)), (y.reshape(-1, 1), raw)):
        judged("average_precision_score", expected, seen, raw.ravel(), None)
    chance = 1 / (1 + np.exp(-raw.ravel()))
    judged("brier_score_loss", y, softmax(two.astype(float)), chance, None)


def test_positions_count_like_rows() -> None:
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(6, 3, 5)), rng.integers(0, 3, (6, 5))
    weight = rng.uniform(0, 2, 6)
    flat = np.moveaxis(scores, 1, 2).reshape(-1, 3)
    for name, arguments in (("accuracy_score", None), ("roc_auc_score", {"multi_class": "ovr"})):
        metric = SklearnMetric(score=name, arguments=arguments)
        whole = streamed(metric, labels, softmax(scores), weight)
        wanted = streamed(metric, labels.ravel(), softmax(flat), np.repeat(weight, 5))
        assert whole == pytest.approx(wanted)


def test_it_trains_by_name_with_arguments_and_goes_through_a_file(tmp_path: Any) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "model.onnx").write_bytes(models.classifier().SerializeToString())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", X=x, y=x[:, :3].argmax(axis=1))
    (tmp_path / "train.toml").write_text(
        'model = "model.onnx"\ndata = "data.npz"\nvalidation = 0.3\nepochs = 2\n'
        'loss = "softmax_cross_entropy"\n'
        'metrics = ["sklearn.accuracy_score", { name = "sklearn.f1_score", average = "macro" }]\n'
        "[[callbacks]]\n"
        'name = "early_stopping"\nmonitor = "validation_sklearn.accuracy_score"\n'
    )
    recipe = Recipe.load(tmp_path / "train.toml", plugins=plugins())
    trainer = Trainer.from_recipe(recipe, plugins())
    history = recipe.run(trainer)
    columns = [c for c in history.columns if "sklearn" in c]
    f1 = "sklearn.f1_score(average=macro)"
    assert columns == ["validation_sklearn.accuracy_score", f"validation_{f1}"]
    (tmp_path / "again.toml").write_text(recipe.resolved(plugins()).to_toml(tmp_path))
    again = Trainer.from_recipe(Recipe.load(tmp_path / "again.toml", plugins=plugins()), plugins())
    resumed = Trainer.resume(trainer.save(tmp_path / "checkpoint"), plugins=plugins())
    for other in (again, resumed):
        assert internals_of(other).setup.metrics == internals_of(trainer).setup.metrics


def test_scores_say_which_way_they_are_better() -> None:
    pytest.importorskip("sklearn")
    ways = {n: SklearnMetric(score=n).better for n in ("r2_score", "max_error", "log_loss")}
    assert ways == {"r2_score": "higher", "max_error": "lower", "log_loss": "lower"}
    assert SklearnMetric(score="matthews_corrcoef").better == "higher"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("sklearn.f1_scor", "has no score 'f1_scor'; did you mean 'f1_score'"),
        ("sklearn.confusion_matrix", "has no score 'confusion_matrix'"),
        ("sklearn.silhouette_score", "has no score 'silhouette_score'"),
        ({"name": "sklearn.f1_score", "averag": "macro"}, "got 'averag'; did you mean 'average'"),
        ({"name": "sklearn"}, r"metrics\[0\].score: a value is missing"),
        ("sklern.f1_score", "unknown metric 'sklern.*did you mean 'sklearn'"),
        ("accuracy.balanced", "the metric 'accuracy' has no member 'balanced'"),
    ],
)
def test_mistakes_are_named(spec: Any, text: str) -> None:
    pytest.importorskip("sklearn")
    with pytest.raises((ConfigError, LookupError), match=text):
        make(models.linear(), metrics=[spec])


def test_what_a_function_finds_wrong_is_said() -> None:
    pytest.importorskip("sklearn")
    metric = SklearnMetric(score="f1_score", arguments={"average": "best"})
    with pytest.raises(DataError, match=r"sklearn.f1_score\(average=best\): .*'average'"):
        streamed(metric, np.array([0, 1]), np.array([0, 1]), None)
    several = SklearnMetric(score="f1_score", arguments={"average": None})
    with pytest.raises(DataError, match=r"an array of shape \(2,\), expected a single number"):
        streamed(several, np.array([0, 1]), np.array([0, 1]), None)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sklearn", "sklearn.metrics"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is missing
    with pytest.raises(ConfigError, match=r"needs scikit-learn, .*pip install .*\[sklearn\]"):
        make(models.linear(), metrics=["sklearn.r2_score"])


def test_a_weighted_training_is_judged_with_its_weights() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    x, y = regression(features=6)
    weight = np.random.default_rng(0).uniform(0, 2, len(x)).astype(np.float32)
    trainer = make(models.mlp(), metrics=["sklearn.mean_absolute_error", "mae"])
    found = trainer.evaluate(x, y, weight)
    wanted = metrics.mean_absolute_error(y, trainer.predict(x), sample_weight=weight)
    assert found["sklearn.mean_absolute_error"] == pytest.approx(wanted, rel=1e-6)
    assert found["mae"] == pytest.approx(wanted, rel=1e-6)
