"""What scikit-learn's users bring: every class that skl2onnx converts, through the life of a model.

The class: a first model that cannot be trained, and does not say why. Each is checked, predicts what
scikit-learn does, is trained (its weights move, its loss falls), exported, run and read again; or is
refused by an error that names the operator, or the tensor, and a way out. The converter's newest opset and
17, weights under and over 1,024 elements. `make test` runs a sample, `make test-all` all of it.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from ortflex_core import FLOATS, Array, Model, OrtflexError, check_model, require_runtime
from ortflex_core.compiler.model import shape_probe
from ortflex_core.compiler.runtime.installation import version_tuple
from tests import models
from tests.training import make, plugins

pytestmark = pytest.mark.sampled

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
    with warnings.catch_warnings(action="ignore"):  # some are deprecated
        known = cls(**arguments).get_params()
        if "random_state" in known and "random_state" not in arguments:
            arguments["random_state"] = 0
        return cls(**arguments)


def case(y: str = "numbers", refused: str = "", x: str = "floats", **arguments: Any) -> Case:
    """A class with plain arguments."""
    return Case(lambda: arguments, y, x, refused)


def plain(names: str, **options: Any) -> dict[str, Case]:
    """Several classes with the same plain arguments."""
    return {name: case(**options) for name in names.split()}


def around(y: str, refused: str = "", **arguments: Callable[[], Any]) -> Case:
    """A class around others, which are made when they are needed."""
    return Case(lambda: {k: make() for k, make in arguments.items()}, y, "floats", refused)


def network(kind: str = "Classifier", units: int = 5) -> Any:
    """A small network, after a few steps of fitting."""
    return new(f"MLP{kind}", hidden_layer_sizes=(units,), activation="tanh", max_iter=4)


def regressor() -> Any:
    return network("Regressor")


def two(kind: str = "Classifier") -> list[tuple[str, Any]]:
    return [("a", network(kind)), ("b", network(kind, 3))]


# They stand in front of a network; ESTIMATORS are the last part. What is refused names the operator that
# holds the fitted numbers. LEFT_OUT has the classes that are in neither, with the reason.
TRANSFORMERS: dict[str, Case] = {
    **plain("SelectFdr SelectFpr SelectFwe", alpha=1.0),
    **plain(
        "GaussianRandomProjection IncrementalPCA NeighborhoodComponentsAnalysis PCA TruncatedSVD",
        n_components=3,
    ),
    **plain(
        "CastTransformer FunctionTransformer MaxAbsScaler MinMaxScaler Normalizer "
        "PolynomialFeatures PowerTransformer RobustScaler StandardScaler TfidfTransformer "
        "VarianceThreshold"
    ),
    **plain("CountVectorizer TfidfVectorizer", x="text", refused="X.* is text", lowercase=False),
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
    **dict.fromkeys(
        ("RFE", "RFECV", "SelectFromModel"),
        around("classes", estimator=lambda: new("LogisticRegression")),
    ),
    "ReplaceTransformer": case(from_value=0.0, to_value=1.0),
    "SelectKBest": case(k=3),
    "SelectPercentile": case(percentile=60),
    "SimpleImputer": case(x="holes"),
    "TargetEncoder": case(x="categories", y="two", target_type="binary"),
}

_TREES = "TreeEnsemble(Regressor|Classifier)?"

ESTIMATORS: dict[str, Case] = {
    **plain("MultiTaskElasticNet MultiTaskLasso", y="several", alpha=0.01),
    **plain("MultiTaskElasticNetCV MultiTaskLassoCV", y="several", cv=2),
    **plain(
        "ExtraTreesClassifier GradientBoostingClassifier RandomForestClassifier",
        y="classes",
        refused=_TREES,
        n_estimators=2,
    ),
    **plain(
        "ExtraTreesRegressor GradientBoostingRegressor RandomForestRegressor",
        refused=_TREES,
        n_estimators=2,
    ),
    **plain("DecisionTreeRegressor ExtraTreeRegressor", refused=_TREES),
    **plain("DecisionTreeClassifier ExtraTreeClassifier", y="classes", refused=_TREES),
    **plain("OneClassSVM SGDOneClassSVM", y=""),
    **plain("GammaRegressor PoissonRegressor TweedieRegressor", y="positive"),
    **plain("ElasticNet Lasso LassoLars QuantileRegressor", alpha=0.01),
    **plain("ElasticNetCV LarsCV LassoCV LassoLarsCV OrthogonalMatchingPursuitCV", cv=2),
    **plain(
        "ComplementNB LinearDiscriminantAnalysis LinearSVC LogisticRegression MultinomialNB "
        "PassiveAggressiveClassifier Perceptron RidgeClassifier RidgeClassifierCV SGDClassifier",
        y="classes",
    ),
    **plain(
        "ARDRegression BayesianRidge GaussianProcessRegressor HuberRegressor Lars LassoLarsIC "
        "LinearRegression LinearSVR NuSVR OrthogonalMatchingPursuit PassiveAggressiveRegressor "
        "RANSACRegressor Ridge RidgeCV SGDRegressor SVR"
    ),
    "AdaBoostClassifier": around("classes", _TREES, n_estimators=lambda: 3),
    "AdaBoostRegressor": around("numbers", _TREES, n_estimators=lambda: 3),
    "BaggingClassifier": around("classes", estimator=network, n_estimators=lambda: 2),
    "BaggingRegressor": around("numbers", estimator=regressor, n_estimators=lambda: 2),
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
    "MultiOutputRegressor": around("several", estimator=regressor),
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
    "StackingClassifier": around("classes", estimators=two, final_estimator=network, cv=lambda: 2),
    "StackingRegressor": around(
        "numbers", estimators=lambda: two("Regressor"), final_estimator=regressor, cv=lambda: 2
    ),
    "TheilSenRegressor": case(max_subpopulation=50),
    "TunedThresholdClassifierCV": around("two", estimator=network, cv=lambda: 2),
    "VotingClassifier": around(
        "classes", estimators=two, voting=lambda: "soft", flatten_transform=lambda: False
    ),
    "VotingRegressor": around("numbers", estimators=lambda: two("Regressor")),
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
    with warnings.catch_warnings(action="ignore"):
        return estimator.fit(given.x) if given.y is None else estimator.fit(given.x, given.y)


def readable_opset(wanted: int | None) -> Any:
    """An opset for the converter: its own choice, or the newest one that the runtime reads."""
    newest = min(require_runtime().max_opset, skl2onnx.__max_supported_opset__)
    return {"": wanted or newest, "ai.onnx.ml": 3}


def convert(estimator: Any, given: Data, target: Any, **options: Any) -> Any:
    """The ModelProto of a fitted estimator, its probabilities as a tensor where there are any."""
    kinds = skl2onnx.common.data_types
    rows = given.x.reshape(len(given.x), -1)
    kind = {"f": kinds.FloatTensorType, "i": kinds.Int64TensorType, "O": kinds.StringTensorType}
    options |= {
        "initial_types": [("X", kind[rows.dtype.kind]([None, rows.shape[1]]))],
        "target_opset": target,
    }
    with warnings.catch_warnings(action="ignore"):
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


OPSETS = (None, 17)
WAYS_OUT = (
    "black_op=|fit a network|or SGDClassifier|name them with params=|Ways out:|add a network|"
    "name a tensor of the graph|Convert the parts that read text apart"
)
COLUMNS = 300
FEW_COLUMNS = frozenset(
    {"BayesianGaussianMixture", "GaussianMixture", "LassoLarsIC", "QuadraticDiscriminantAnalysis"}
    | {"RANSACRegressor", "TheilSenRegressor"}
)
# What people try first.
FIRST = frozenset(
    {"ColumnTransformer", "LinearRegression", "LinearSVC", "LogisticRegression", "MLPClassifier"}
    | {"MLPRegressor", "MinMaxScaler", "PCA", "RandomForestClassifier", "StandardScaler"}
)
# Their rounding is another one: long sums of exponentials, and ranks.
ROUGH = {"GaussianProcessRegressor": 1e-2, "QuantileTransformer": 1e-2}


def combinations(names: Any) -> list[Any]:
    """Every name at both opsets and sizes; of a third of the names, and the usual ones, one is not slow."""
    marked = []
    for name in sorted(names):
        for k in range(4):
            code = zlib.crc32(name.encode())
            chosen = code % 4 == k and (code // 4 % 3 == 0 or name in FIRST)
            marks = [] if chosen else [pytest.mark.slow]
            opset, large = OPSETS[k % 2], k >= 2
            label = f"{name}-{opset or 'newest'}-{'large' if large else 'small'}"
            marked.append(pytest.param(name, opset, large, marks=marks, id=label))
    return marked


def test_every_converter_is_in_the_matrix_or_left_out_for_a_reason() -> None:
    sets = [set(TRANSFORMERS), set(ESTIMATORS), set(LEFT_OUT)]
    assert set().union(*sets) == set(CLASSES)
    assert sum(map(len, sets)) == len(CLASSES)
    assert all(LEFT_OUT.values())


def output_of(model: Model) -> str:
    """The last float output: probabilities, scores or numbers."""
    return [o.name for o in model.outputs if o.dtype in FLOATS][-1]


def live(proto: Any, x: Array, references: list[Array], tolerance: float, folder: Path) -> None:
    model = Model(proto)
    shape_probe.complete_shapes(model)
    assert model.unlearned == ""
    output = output_of(model)
    loss = {output: "squared_error"}
    report = check_model(model, loss, plugins=plugins())
    assert report.backends["fused"] == ()
    options = {"loss": loss, "backend": "fused", "check_finite": False}
    trainer = make(model, epochs=3, learning_rate=1e-4, batch_size=10, **options)
    before = trainer.predict(x, output)
    np.testing.assert_allclose(
        before, models.predict(proto, {"X": x})[output], rtol=1e-4, atol=1e-5
    )
    distances = [float(np.abs(before - r).max()) for r in map(alike(before), references)]
    assert min(distances) <= tolerance * (1 + np.abs(before).max())
    weights = trainer.get_state()
    trainer.fit(x, before * 0.9 - 0.05)
    losses = trainer.train_losses_
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert any(not np.array_equal(weights[n], a) for n, a in trainer.get_state().items())
    after = trainer.predict(x, output)
    trainer.export(folder / "trained.onnx")
    served = models.predict(Model(folder / "trained.onnx").proto, {"X": x})[output]
    np.testing.assert_allclose(served, after, rtol=1e-4, atol=1e-5)
    again = make(folder / "trained.onnx", **options)
    np.testing.assert_allclose(again.predict(x, output), after, rtol=1e-5, atol=1e-6)


def alike(array: Array) -> Callable[[Array], Array]:
    """Values of scikit-learn in the shape of an output; infinitely far if they are others."""
    return lambda found: (
        found.reshape(array.shape) if found.size == array.size else np.full(array.shape, np.inf)
    )


def references(estimator: Any, x: Array) -> list[Array]:
    """Whatever scikit-learn gives for some rows: a file's last output is one of these."""
    names = ("predict_proba", "decision_function", "score_samples", "transform", "predict")
    found = []
    for name in names:
        try:
            array = np.asarray(getattr(estimator, name)(x))
        except AttributeError:
            continue
        if array.dtype.kind in "fiu":
            found.append(array.astype(np.float64))
    if "predict_proba" in names and len(found) > 0 and found[0].ndim == 1:
        found.append(np.stack([1 - found[0], found[0]], 1))
    return found


@pytest.mark.parametrize(("name", "opset", "large"), combinations(TRANSFORMERS))
def test_a_transformer_before_a_network(
    name: str, opset: int | None, large: bool, tmp_path: Path
) -> None:
    if name == "KNNImputer" and version_tuple(onnxruntime.__version__) < (1, 20):
        pytest.skip("onnxruntime before 1.20 fails on the converter's own file")
    pipeline, rows = behind(name, TRANSFORMERS[name], 250 if large else 5)
    proto = converted(pipeline, rows, opset)
    if refused := TRANSFORMERS[name].refused:
        with pytest.raises(OrtflexError, match=refused) as caught:
            attempt(proto)
        assert re.search(WAYS_OUT, str(caught.value))
        return
    wanted = [pipeline.predict_proba(rows.x)]
    live(proto, rows.x.reshape(len(rows.x), -1), wanted, ROUGH.get(name, 1e-4), tmp_path)


def converted(estimator: Any, rows: Data, opset: int | None, **options: Any) -> Any:
    """The file; a converter that does not support an opset skips the test."""
    try:
        return convert(estimator, rows, readable_opset(opset), **options)
    except RuntimeError as error:
        if opset is None or "opset" not in str(error):
            raise
        pytest.skip(f"the converter: {error}")


@pytest.mark.parametrize(("name", "opset", "large"), combinations(ESTIMATORS))
def test_an_estimator(name: str, opset: int | None, large: bool, tmp_path: Path) -> None:
    """Trained; or refused, and then trained by the way out that the refusal names, if it is one."""
    case = ESTIMATORS[name]
    if large and name in FEW_COLUMNS:
        pytest.skip("it is not fitted, or certain of everything, with more columns than rows")
    rows = data(case, COLUMNS if large else 4)
    estimator = fitted(new(name, **case.arguments()), rows)
    proto = converted(estimator, rows, opset)
    if case.refused:
        with pytest.raises(OrtflexError, match=f"(?s){case.refused}") as caught:
            attempt(proto)
        assert re.search(WAYS_OUT, str(caught.value))
        if "black_op=" not in str(caught.value):
            return
        operators = {"LinearClassifier", "LinearRegressor"}
        proto = converted(estimator, rows, opset, black_op=operators)
    live(proto, rows.x, references(estimator, rows.x), ROUGH.get(name, 1e-4), tmp_path)


def attempt(proto: Any) -> None:
    """What a user does first: the loss on the last output, and a fit."""
    model = Model(proto)
    shape_probe.complete_shapes(model)
    floats = [o.name for o in model.outputs if o.dtype in FLOATS]
    loss = {floats[-1]: "squared_error"} if floats else "squared_error"
    trainer = make(model, loss=loss, backend="fused", epochs=1)
    x = np.ones((4, *(d for d in model.inputs[0].shape or () if isinstance(d, int))), np.float32)
    trainer.fit(x, np.zeros_like(trainer.predict(x, floats[-1])))


@pytest.mark.parametrize("name", ["MinMaxScaler", "StandardScaler"])
def test_a_pipeline_at_the_opset_of_the_converters_choice(name: str, tmp_path: Path) -> None:
    """The class: a user who names no opset, and a runtime older than the converter's newest one.

    The older runtimes cannot run the file that is exported: onnx's reference evaluator does.
    """
    pipeline, rows = behind(name, TRANSFORMERS[name], 5)
    proto = convert(pipeline, rows, None)
    options = {"loss": {"probabilities": "squared_error"}, "backend": "fused"}
    trainer = make(proto, epochs=3, learning_rate=1e-2, batch_size=10, **options)
    before = trainer.predict(rows.x, "probabilities")
    np.testing.assert_allclose(before, pipeline.predict_proba(rows.x), rtol=1e-4, atol=1e-5)
    trainer.fit(rows.x, np.roll(before, 1, axis=1))
    assert trainer.train_losses_[-1] < trainer.train_losses_[0]
    exported = trainer.export(tmp_path / "trained.onnx")
    assert exported.opset_import == proto.opset_import
    after = trainer.predict(rows.x, "probabilities")
    assert np.abs(after - before).max() > 1e-3
    told = ReferenceEvaluator(exported).run(["probabilities"], {"X": rows.x})[0]
    np.testing.assert_allclose(told, after, rtol=1e-4, atol=1e-5)
    again = make(tmp_path / "trained.onnx", **options)
    np.testing.assert_allclose(again.predict(rows.x, "probabilities"), after, rtol=1e-5, atol=1e-6)
