"""What scikit-learn's users bring: every class that skl2onnx converts, through the life of a model.

The class: a first model that cannot be trained, and does not say why. Each is checked, predicts what
scikit-learn does, is trained (its weights move, its loss falls), exported, run and read again; or is
refused by an error that names the operator, or the tensor, and a way out. The converter's newest opset and
17, weights under and over 1,024 elements. `make test` runs a sample, `make test-all` all of it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from ortflex_core import FLOATS, Array, Model, OrtflexError, check_model
from ortflex_core.compiler.model import shape_probe
from ortflex_core.compiler.runtime.installation import version_tuple
from tests.end_to_end import sklearn_cases as cases
from tests.training import make, plugins

pytestmark = pytest.mark.sampled

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
    sets = [set(cases.TRANSFORMERS), set(cases.ESTIMATORS), set(cases.LEFT_OUT)]
    assert set().union(*sets) == set(cases.CLASSES)
    assert sum(map(len, sets)) == len(cases.CLASSES)
    assert all(cases.LEFT_OUT.values())


def output_of(model: Model) -> str:
    """The last float output: probabilities, scores or numbers."""
    return [o.name for o in model.outputs if o.dtype in FLOATS][-1]


def run(proto: Any, x: Array, output: str) -> Array:
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run([output], {"X": x})[0]  # type: ignore[no-any-return]


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
    np.testing.assert_allclose(before, run(proto, x, output), rtol=1e-4, atol=1e-5)
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
    exported = Model(folder / "trained.onnx")
    np.testing.assert_allclose(run(exported.proto, x, output), after, rtol=1e-4, atol=1e-5)
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


@pytest.mark.parametrize(("name", "opset", "large"), combinations(cases.TRANSFORMERS))
def test_a_transformer_before_a_network(
    name: str, opset: int | None, large: bool, tmp_path: Path
) -> None:
    if name == "KNNImputer" and version_tuple(onnxruntime.__version__) < (1, 20):
        pytest.skip(
            "onnxruntime before 1.20 fails on the converter's own file, or ends the process"
        )
    pipeline, rows = cases.behind(name, cases.TRANSFORMERS[name], 250 if large else 5)
    proto = converted(pipeline, rows, opset)
    if refused := cases.TRANSFORMERS[name].refused:
        with pytest.raises(OrtflexError, match=refused) as caught:
            attempt(proto)
        assert re.search(WAYS_OUT, str(caught.value))
        return
    wanted = [pipeline.predict_proba(rows.x)]
    live(proto, rows.x.reshape(len(rows.x), -1), wanted, ROUGH.get(name, 1e-4), tmp_path)


def converted(estimator: Any, rows: cases.Data, opset: int | None, **options: Any) -> Any:
    """The file; a converter that does not support an opset skips the test."""
    try:
        return cases.converted(estimator, rows, cases.opset(opset), **options)
    except RuntimeError as error:
        if opset is None or "opset" not in str(error):
            raise
        pytest.skip(f"the converter: {error}")


@pytest.mark.parametrize(("name", "opset", "large"), combinations(cases.ESTIMATORS))
def test_an_estimator(name: str, opset: int | None, large: bool, tmp_path: Path) -> None:
    """Trained; or refused, and then trained by the way out that the refusal names, if it is one."""
    case = cases.ESTIMATORS[name]
    if large and name in FEW_COLUMNS:
        pytest.skip("it is not fitted, or certain of everything, with more columns than rows")
    rows = cases.data(case, COLUMNS if large else 4)
    estimator = cases.fitted(cases.new(name, **case.arguments()), rows)
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
    pipeline, rows = cases.behind(name, cases.TRANSFORMERS[name], 5)
    proto = cases.converted(pipeline, rows, None)
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
