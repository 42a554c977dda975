"""Every class that skl2onnx converts: how it is made and fitted, and what ortflex makes of it.

``TRANSFORMERS`` stand in front of a network, ``ESTIMATORS`` are the last part. What is refused names the
operator that holds the fitted numbers. ``LEFT_OUT`` has the classes that are in neither, with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from ortflex_core import Array, require_runtime

skl2onnx = pytest.importorskip("skl2onnx")
_registry = pytest.importorskip("skl2onnx._supported_operators")

CLASSES = {cls.__name__: cls for cls in _registry.sklearn_operator_name_map}
ROWS = 40


@attrs.frozen
class Case:
    """A class: its arguments, what it is fitted on, and the operator that keeps it from training."""

    arguments: Callable[[], dict[str, Any]] = dict
    y: str = "numbers"
    x: str = "floats"
    refused: str = ""


def new(name: str, **arguments: Any) -> Any:
    """An estimator of a class of the registry, which starts from a fixed seed."""
    cls = CLASSES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are deprecated
        known = cls(**arguments).get_params()
        if "random_state" in known and "random_state" not in arguments:
            arguments["random_state"] = 0
        return cls(**arguments)


def case(y: str = "numbers", refused: str = "", x: str = "floats", **arguments: Any) -> Case:
    """A class with plain arguments."""
    return Case(lambda: arguments, y, x, refused)


def alike(names: str, **options: Any) -> dict[str, Case]:
    """Several classes with the same plain arguments."""
    return {name: case(**options) for name in names.split()}


def around(y: str, refused: str = "", **arguments: Callable[[], Any]) -> Case:
    """A class around others, which are made when they are needed."""
    return Case(lambda: {k: make() for k, make in arguments.items()}, y, "floats", refused)


def network(kind: str = "Classifier", units: int = 5) -> Any:
    """A small network, after a few steps of fitting."""
    return new(f"MLP{kind}", hidden_layer_sizes=(units,), activation="tanh", max_iter=4)


TRANSFORMERS: dict[str, Case] = {
    **alike("SelectFdr SelectFpr SelectFwe", alpha=1.0),
    **alike(
        "GaussianRandomProjection IncrementalPCA NeighborhoodComponentsAnalysis PCA TruncatedSVD",
        n_components=3,
    ),
    **alike(
        "CastTransformer FunctionTransformer MaxAbsScaler MinMaxScaler Normalizer "
        "PolynomialFeatures PowerTransformer RobustScaler StandardScaler TfidfTransformer "
        "VarianceThreshold"
    ),
    "Binarizer": case(threshold=0.5),
    "ColumnTransformer": Case(
        lambda: {
            "transformers": [
                ("scaled", new("StandardScaler"), [0, 2]),
                ("shares", new("MinMaxScaler"), [1]),
            ],
            "remainder": "passthrough",
        }
    ),
    "CountVectorizer": case(x="text", refused="X.* is text", lowercase=False),
    "FeatureUnion": Case(
        lambda: {"transformer_list": [("a", new("StandardScaler")), ("b", new("MaxAbsScaler"))]}
    ),
    "GenericUnivariateSelect": case(mode="k_best", param=2),
    "KBinsDiscretizer": case(
        encode="onehot-dense", n_bins=3, quantile_method="averaged_inverted_cdf"
    ),
    "KNNImputer": case(n_neighbors=3),
    "KNeighborsTransformer": case(n_neighbors=3),
    "KernelPCA": case(n_components=3, kernel="rbf"),
    "OneHotEncoder": case(x="categories", sparse_output=False, handle_unknown="ignore"),
    "OrdinalEncoder": case(x="categories"),
    "QuantileTransformer": case(n_quantiles=10),
    "RFE": around("classes", estimator=lambda: new("LogisticRegression")),
    "RFECV": around("classes", estimator=lambda: new("LogisticRegression")),
    "ReplaceTransformer": case(from_value=0.0, to_value=1.0),
    "SelectFromModel": around("classes", estimator=lambda: new("LogisticRegression")),
    "SelectKBest": case(k=3),
    "SelectPercentile": case(percentile=60),
    "SimpleImputer": case(x="holes"),
    "TargetEncoder": case(x="categories", y="two", target_type="binary"),
    "TfidfVectorizer": case(x="text", refused="X.* is text", lowercase=False),
}

_TREES = "TreeEnsemble(Regressor|Classifier)?"

ESTIMATORS: dict[str, Case] = {
    **alike("MultiTaskElasticNet MultiTaskLasso", y="several", alpha=0.01),
    **alike("MultiTaskElasticNetCV MultiTaskLassoCV", y="several", cv=2),
    **alike(
        "ExtraTreesClassifier GradientBoostingClassifier RandomForestClassifier",
        y="classes",
        refused=_TREES,
        n_estimators=2,
    ),
    **alike(
        "ExtraTreesRegressor GradientBoostingRegressor RandomForestRegressor",
        refused=_TREES,
        n_estimators=2,
    ),
    **alike("DecisionTreeRegressor ExtraTreeRegressor", refused=_TREES),
    **alike("DecisionTreeClassifier ExtraTreeClassifier", y="classes", refused=_TREES),
    **alike("OneClassSVM SGDOneClassSVM", y=""),
    **alike("GammaRegressor PoissonRegressor TweedieRegressor", y="positive"),
    **alike("ElasticNet Lasso LassoLars QuantileRegressor", alpha=0.01),
    **alike("ElasticNetCV LarsCV LassoCV LassoLarsCV OrthogonalMatchingPursuitCV", cv=2),
    **alike(
        "ComplementNB LinearDiscriminantAnalysis LinearSVC LogisticRegression MultinomialNB "
        "PassiveAggressiveClassifier Perceptron RidgeClassifier RidgeClassifierCV SGDClassifier",
        y="classes",
    ),
    **alike(
        "ARDRegression BayesianRidge GaussianProcessRegressor HuberRegressor Lars LassoLarsIC "
        "LinearRegression LinearSVR NuSVR OrthogonalMatchingPursuit PassiveAggressiveRegressor "
        "RANSACRegressor Ridge RidgeCV SGDRegressor SVR"
    ),
    "AdaBoostClassifier": around("classes", _TREES, n_estimators=lambda: 3),
    "AdaBoostRegressor": around("numbers", _TREES, n_estimators=lambda: 3),
    "BaggingClassifier": around("classes", estimator=network, n_estimators=lambda: 2),
    "BaggingRegressor": around(
        "numbers", estimator=lambda: network("Regressor"), n_estimators=lambda: 2
    ),
    "BayesianGaussianMixture": case(y="", n_components=2),
    "BernoulliNB": case("classes", "feature_log_prob"),
    "CalibratedClassifierCV": around("classes", estimator=network, cv=lambda: 2),
    "CastRegressor": around("numbers", estimator=lambda: new("LinearRegression")),
    "CategoricalNB": case("classes", "feature_log_proba", x="categories"),
    "GaussianMixture": case("", n_components=2),
    "GaussianNB": case("classes", "theta"),
    "GaussianProcessClassifier": case("two", "Solve"),
    "GridSearchCV": around(
        "classes", estimator=network, param_grid=lambda: {"alpha": [0.1, 0.01]}, cv=lambda: 2
    ),
    "IsolationForest": case("", _TREES, n_estimators=2),
    "KNeighborsClassifier": case("classes", "Scan"),
    "KNeighborsRegressor": case(refused="Scan"),
    "KMeans": case("", n_clusters=3),
    "LocalOutlierFactor": case("", novelty=True),
    "LogisticRegressionCV": case("classes", cv=2, l1_ratios=(0,), use_legacy_attributes=False),
    "MLPClassifier": case("classes", hidden_layer_sizes=(5,), activation="tanh", max_iter=4),
    "MLPRegressor": case(hidden_layer_sizes=(5,), activation="tanh", max_iter=4),
    "MiniBatchKMeans": case("", n_clusters=3),
    "MultiOutputClassifier": around(
        "several classes", "no float output for a loss", estimator=network
    ),
    "MultiOutputRegressor": around("several", estimator=lambda: network("Regressor")),
    "NearestNeighbors": case("", "Scan", radius=None),
    "NuSVC": case("classes", "SVMClassifier", nu=0.1),
    "OneVsOneClassifier": around("classes", estimator=network),
    "OneVsRestClassifier": around("classes", estimator=network),
    "PLSRegression": case("several", n_components=2),
    "Pipeline": Case(
        lambda: {"steps": [("scaled", new("StandardScaler")), ("network", network())]}, "classes"
    ),
    "QuadraticDiscriminantAnalysis": case("classes", "rotations"),
    "RadiusNeighborsClassifier": case("classes", "Scan", radius=9.0),
    "RadiusNeighborsRegressor": case(refused="Scan", radius=9.0),
    "SVC": case("classes", "SVMClassifier"),
    "StackingClassifier": around(
        "classes",
        estimators=lambda: [("a", network()), ("b", network(units=3))],
        final_estimator=network,
        cv=lambda: 2,
    ),
    "StackingRegressor": around(
        "numbers",
        estimators=lambda: [("a", network("Regressor")), ("b", network("Regressor", 3))],
        final_estimator=lambda: network("Regressor"),
        cv=lambda: 2,
    ),
    "TheilSenRegressor": case(max_subpopulation=50),
    "TunedThresholdClassifierCV": around("two", estimator=network, cv=lambda: 2),
    "VotingClassifier": around(
        "classes",
        estimators=lambda: [("a", network()), ("b", network(units=3))],
        voting=lambda: "soft",
        flatten_transform=lambda: False,
    ),
    "VotingRegressor": around(
        "numbers", estimators=lambda: [("a", network("Regressor")), ("b", network("Regressor", 3))]
    ),
}

LEFT_OUT = {
    "DictVectorizer": "its input is a map, and a Trainer feeds tensors",
    "FeatureHasher": "its converter takes columns of text and counts apart, no matrix",
    "HistGradientBoostingClassifier": "skl2onnx 1.20 cannot convert what this scikit-learn fits",
    "HistGradientBoostingRegressor": "skl2onnx 1.20 cannot convert what this scikit-learn fits",
    "KernelCenterer": "it is fitted on a kernel matrix of the training rows",
    "LabelBinarizer": "it transforms labels",
    "LabelEncoder": "it transforms labels",
    "RandomTreesEmbedding": "its output is sparse, which its converter refuses",
    "_ConstantPredictor": "a part of OneVsRestClassifier, which has no weights",
}


@attrs.frozen
class Data:
    """Rows and labels to fit and to train on."""

    x: Array
    y: Any


def data(case: Case, features: int = 4) -> Data:
    """Rows of the kind that a class is fitted on."""
    rng = np.random.default_rng(11)
    x: Array = rng.uniform(0.1, 2.0, (ROWS, features)).astype(np.float32)
    score = x[:, 0] - x[:, 1] + 0.1 * rng.standard_normal(ROWS)
    y = {
        "numbers": score.astype(np.float32),
        "positive": (score - score.min() + 0.2).astype(np.float32),
        "several": np.stack([score, -score + x[:, 2]], 1).astype(np.float32),
        "classes": np.digitize(score, [-0.3, 0.3]),
        "two": (score > 0).astype(np.int64),
        "several classes": np.stack([np.digitize(score, [-0.3, 0.3]), np.arange(ROWS) % 3], 1),
        "": None,
    }[case.y]
    if case.x == "categories":
        x = rng.integers(0, 3, (ROWS, features))
    elif case.x == "holes":
        x[rng.random(x.shape) < 0.2] = np.nan
    elif case.x == "text":
        words = np.array(["red", "green", "blue", "round"])
        x = np.array([" ".join(rng.choice(words, 3)) for _ in range(ROWS)], dtype=object)
    return Data(x, y)


def fitted(estimator: Any, given: Data) -> Any:
    """The estimator after its fit, which need not converge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return estimator.fit(given.x) if given.y is None else estimator.fit(given.x, given.y)


def opset(wanted: int | None) -> Any:
    """An opset for the converter: its own choice, or the newest one that the runtime reads."""
    newest = min(require_runtime().max_opset, skl2onnx.__max_supported_opset__)
    return {"": wanted or newest, "ai.onnx.ml": 3}


def converted(estimator: Any, given: Data, target: Any, **options: Any) -> Any:
    """The ModelProto of a fitted estimator, its probabilities as a tensor where there are any."""
    kinds = skl2onnx.common.data_types
    rows = given.x.reshape(len(given.x), -1)
    kind = {"f": kinds.FloatTensorType, "i": kinds.Int64TensorType, "O": kinds.StringTensorType}
    options |= {
        "initial_types": [("X", kind[rows.dtype.kind]([None, rows.shape[1]]))],
        "target_opset": target,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return skl2onnx.convert_sklearn(estimator, options={"zipmap": False}, **options)
        except NameError:  # a class without that option
            return skl2onnx.convert_sklearn(estimator, **options)


def behind(name: str, transformer: Case, units: int) -> tuple[Any, Data]:
    """A transformer and a network after it, fitted, and the rows of both."""
    rows = data(transformer)
    if transformer.y != "two":
        rows = attrs.evolve(rows, y=data(Case(y="classes")).y)
    steps = [("before", new(name, **transformer.arguments())), ("network", network(units=units))]
    return fitted(new("Pipeline", steps=steps), rows), rows
