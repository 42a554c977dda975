"""Metrics against scikit-learn's, batch by batch and weighted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, Metric
from ortflex_plugins.metrics.classification import Accuracy
from ortflex_plugins.metrics.regression import R2, MeanAbsoluteError, RootMeanSquaredError
from tests.training import plugins

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
def test_of_nothing_a_metric_is_nan(metric: Metric) -> None:
    assert math.isnan(metric.start().result())
    state = metric.start()
    state.update(np.zeros(3), np.zeros(3), np.zeros(3))
    assert math.isnan(state.result())


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
