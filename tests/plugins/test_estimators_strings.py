"""Estimators train pipelines that read strings, or columns of several types.

The oracle is onnxruntime with the whole exported file. The class of errors: a column that reaches another
input than its own, rows that lose their order, and values that are no strings.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Array, DataError
from tests import models

pytest.importorskip("sklearn")
skl2onnx = pytest.importorskip("skl2onnx")

OrtClassifier = pytest.importorskip("ortflex_plugins.estimators").OrtClassifier
OrtRegressor = pytest.importorskip("ortflex_plugins.estimators").OrtRegressor

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.once]

COLORS, WORDS = ["red", "green", "blue"], ["good", "bad", "film", "the", "nice", "awful"]


def converted(steps: list[Any], x: Any, y: Array, types: list[tuple[str, Any]]) -> onnx.ModelProto:
    """A pipeline of scikit-learn, hardly fitted, as a file."""
    from sklearn.pipeline import make_pipeline

    options = {"zipmap": False} if len(np.unique(y)) == 2 else None
    pipeline = make_pipeline(*steps).fit(x, y)
    return skl2onnx.to_onnx(pipeline, initial_types=types, options=options, target_opset=17)


def categories() -> tuple[onnx.ModelProto, Array, Array]:
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import OneHotEncoder

    x = np.random.default_rng(0).choice(COLORS, (200, 2)).astype(object)
    y = np.where((x[:, 0] == "red") | (x[:, 1] == "blue"), 1, 0)
    steps = [OneHotEncoder(), LogisticRegression(max_iter=1)]
    return converted(steps, x, y, [("X", StringTensorType([None, 2]))]), x, y


def sentences() -> tuple[onnx.ModelProto, Array, Array]:
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(1)
    x = np.array([" ".join(rng.choice(WORDS, 5)) for _ in range(200)], object)
    y = np.array([int("good" in text) for text in x])
    steps = [TfidfVectorizer(lowercase=False), LogisticRegression(max_iter=1)]
    return converted(steps, x, y, [("X", StringTensorType([None]))]), x, y


def table(regression: bool) -> tuple[onnx.ModelProto, Any, Array]:
    """A ColumnTransformer of two numbers and a category: a model with an input for each column."""
    pandas = pytest.importorskip("pandas")
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    rng = np.random.default_rng(2)
    numbers, colors = rng.standard_normal((2, 300)).astype(np.float32), rng.choice(COLORS, 300)
    x = pandas.DataFrame({"size": numbers[0], "color": colors, "weight": 10 + 3 * numbers[1]})
    y = numbers[0] - 2 * numbers[1] + (colors == "red")
    y = y if regression else (y > 0).astype(int)
    encoder = ColumnTransformer(
        [("n", StandardScaler(), ["size", "weight"]), ("c", OneHotEncoder(), ["color"])]
    )
    last = Ridge(alpha=1e5) if regression else LogisticRegression(C=1e-5)
    types = [("size", FloatTensorType([None, 1])), ("color", StringTensorType([None, 1]))]
    types.append(("weight", FloatTensorType([None, 1])))
    return converted([encoder, last], x, y, types), x, y


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return list(models.predict(model, feeds).values())


def columns(x: Any) -> dict[str, Any]:
    """The inputs of the model of a table."""
    types = {"size": np.float32, "color": object, "weight": np.float32}
    return {name: np.asarray(x[name], dtype)[:, None] for name, dtype in types.items()}


@pytest.mark.parametrize("build", [categories, sentences])
@pytest.mark.parametrize("form", ["objects", "fixed width", "lists"])
def test_a_pipeline_with_strings_is_fitted(build: Any, form: str) -> None:
    model, x, y = build()
    made = {"objects": x, "fixed width": x.astype(str), "lists": x.tolist()}[form]
    clf = OrtClassifier(model, learning_rate=0.5, max_iter=40, random_state=0)
    clf.fit(made, np.where(y, "yes", "no"), sample_weight=np.ones(len(y)))
    assert clf.score(made, np.where(y, "yes", "no")) > 0.97
    _, probabilities = run(clf.to_onnx(), {"X": x})
    np.testing.assert_allclose(clf.predict_proba(made), probabilities, rtol=1e-4, atol=1e-6)
    again = pickle.loads(pickle.dumps(clf))
    np.testing.assert_array_equal(again.predict_proba(made), clf.predict_proba(made))


def test_texts_are_searched_and_continued() -> None:
    from sklearn.model_selection import GridSearchCV

    model, x, y = sentences()
    clf = OrtClassifier(model, max_iter=20, random_state=0)
    search = GridSearchCV(clf, {"learning_rate": [1e-6, 0.5]}, cv=2).fit(x, y)
    assert search.best_params_ == {"learning_rate": 0.5}
    clf = OrtClassifier(model, learning_rate=0.5, random_state=0)
    losses = [clf.partial_fit(x, y, classes=[0, 1]).loss_ for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("regression", [False, True])
def test_a_table_has_a_column_for_each_input(regression: bool) -> None:
    model, x, y = table(regression)
    kind = OrtRegressor if regression else OrtClassifier
    estimator = kind(model, learning_rate=0.1, max_iter=100, random_state=0).fit(x, y)
    assert estimator.score(x, y) > (0.98 if regression else 0.95)
    assert list(estimator.feature_names_in_) == ["size", "color", "weight"]
    got = estimator.predict(x) if regression else estimator.predict_proba(x)
    expected = run(estimator.to_onnx(), columns(x))[-1]
    np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=1e-3, atol=1e-4)
    # Columns have names, so the order of the table does not count; arrays have the order of the inputs.
    turned = x[["weight", "size", "color"]]
    other = kind(model, learning_rate=0.1, max_iter=100, random_state=0).fit(turned, y)
    np.testing.assert_array_equal(other.predict(turned), estimator.predict(x))
    other.fit(x.to_numpy(), y)
    np.testing.assert_array_equal(other.predict(x.to_numpy()), estimator.predict(x))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.rename(columns={"color": "colr"}), "'colr'.*'color'"),
        (lambda x: x.to_numpy()[:, :2], "one column for each"),
        (lambda x: x.assign(color=1), "row 0, column 0.*reads strings"),
        (lambda x: x.assign(size="large"), "size.*cannot hold"),
        (lambda x: x.assign(color=None), "None in row 0"),
    ],
)
def test_tables_that_do_not_fit_are_refused(change: Any, words: str) -> None:
    model, x, y = table(regression=False)
    with pytest.raises((DataError, ValueError), match=words):
        OrtClassifier(model, max_iter=2).fit(change(x), y)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: np.full(x.shape, None, object), "None in row 0, column 0"),
        (lambda x: np.ones(x.shape), r"1\.0 in row 0, column 0.*strings"),
        (lambda x: x[:, :1], "1 features.*expects 2"),
        (lambda x: x[:, 0], "1 features.*expects 2"),
    ],
)
def test_rows_that_are_no_strings_are_refused(change: Any, words: str) -> None:
    model, x, y = categories()
    with pytest.raises(DataError, match=words):
        OrtClassifier(model, max_iter=2).fit(change(x), y)
