"""What users of the older API call: the documented lines, state, pickles, searches, errors."""

from __future__ import annotations

import inspect
import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortflex_plugins.onnxcustom as api
from ortflex_core import DataError, ModelError
from ortflex_plugins.onnxcustom import (
    ConvergenceWarning,
    ElasticLearningPenalty,
    LearningRateSGD,
    LearningRateSGDNesterov,
)
from tests import models
from tests.plugins.onnxcustom_regression import BOTH, NAMES, ROWS, W, X, Y, fitted, trainer


def arrays(state: Any) -> list[Any]:
    values = [state[n] for n in NAMES] if isinstance(state, dict) else state
    return [np.array(v if isinstance(v, np.ndarray) else v.numpy()) for v in values]


def same(a: Any, b: Any) -> None:
    for x, y in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_array_equal(x, y)


INSIDE = """
onx_loss = add_loss_output(onx, weight_name='weight', score_name='elastic', l1_weight=0.1, l2_weight=0.9,
                           penalty={'coef': {'l2': 0.01}})
train_session = OrtGradientOptimizer(onx_loss, ['intercept', 'coef'], learning_rate=1e-3)
train_session.fit(X_train, y_train, w_train)
state_tensors = train_session.get_state(); losses = train_session.train_losses_
"""
BESIDE = """
train_session = OrtGradientForwardBackwardOptimizer(
    onx, ['coef', 'intercept'], learning_rate=LearningRateSGDNesterov(),
    learning_loss=ElasticLearningLoss(l1_weight=0.1, l2_weight=0.9),
    learning_penalty=ElasticLearningPenalty(l1=0.1, l2=0.9))
train_session.fit(X_train, y_train, w_train)
"""


@pytest.mark.parametrize("lines", [INSIDE, BESIDE], ids=["inside", "beside"])
def test_the_documented_lines_run_as_they_stand(lines: str) -> None:
    pytest.importorskip("sklearn")
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LinearRegression

    regression = LinearRegression().fit(X, Y[:, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's attributes it asks for
        onx = skl2onnx.to_onnx(regression, X, target_opset=15, black_op={"LinearRegressor"})
    names: dict[str, Any] = {"onx": onx, "X_train": X, "y_train": Y[:, 0], "w_train": W}
    exec("from ortflex_plugins.onnxcustom import *", names)
    np.random.seed(0)
    exec(lines, names)
    session = names["train_session"]
    assert len(session.train_losses_) == 100
    assert np.isfinite(session.train_losses_).all()
    if lines is INSIDE:
        assert names["losses"][-1] < names["losses"][0]
        assert sorted(names["state_tensors"]) == NAMES


DEFAULTS = {
    "add_loss_output": "(onx, score_name='squared_error', loss_name='loss', label_name='label', "
    "weight_name=None, penalty=None, output_index=None, **kwargs)",
    "OrtGradientOptimizer": "(model_onnx, weights_to_train, loss_output_name='loss', max_iter=100, "
    "training_optimizer_name='SGDOptimizer', batch_size=10, learning_rate='SGD', device='cpu', "
    "warm_start=False, verbose=0, validation_every=0.1, saved_gradient=None, "
    "sample_weight_name='weight')",
    "OrtGradientForwardBackwardOptimizer": "(model_onnx, weights_to_train=None, "
    "loss_output_name='loss', max_iter=100, training_optimizer_name='SGDOptimizer', batch_size=10, "
    "learning_rate='SGD', device='cpu', warm_start=False, verbose=0, validation_every=0.1, "
    "learning_loss='square_error', enable_logging=False, weight_name=None, learning_penalty=None, "
    "exc=True)",
    "LearningRateSGD": "(eta0=0.01, alpha=0.0001, power_t=0.25, learning_rate='invscaling')",
    "LearningRateSGDNesterov": "(eta0=0.01, alpha=0.0001, power_t=0.25, "
    "learning_rate='invscaling', momentum=0.9, nesterov=True)",
    "SquareLearningLoss": "()",
    "AbsoluteLearningLoss": "()",
    "ElasticLearningLoss": "(l1_weight=0.5, l2_weight=0.5)",
    "NegLogLearningLoss": "(eps=1e-05, probability_function='sigmoid')",
    "NoLearningPenalty": "()",
    "ElasticLearningPenalty": "(l1=0.5, l2=0.5)",
    "OrtDataLoader": "(X, y, sample_weight=None, batch_size=20, device='cpu', random_iter=True)",
    "onnx_derivative": "(onx, weights=None, inputs=None, options=<DerivativeOptions.Zero: 0>, "
    "loss=None, label=None, path_name=None)",
    "onnx_rename_weights": "(onx)",
    "get_train_initializer": "(onx)",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_arguments_and_defaults_are_the_old_ones(name: str) -> None:
    signature = inspect.signature(getattr(api, name))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    plain = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    assert str(plain) == DEFAULTS[name]


def test_derivative_options_have_the_old_numbers() -> None:
    options = {o.name: int(o) for o in api.DerivativeOptions.__members__.values()}
    known = {"Zero": 0, "KeepYieldOp": 1, "KeepOutputs": 2, "FillGrad": 4}
    assert {k: options[k] for k in known} == known
    assert api.DerivativeOptions.Loss == 5


@BOTH
def test_state_is_there_after_fit_only(way: str) -> None:
    session = trainer(way)
    for ask in (session.get_state, session.get_full_state, session.get_trained_onnx):
        with pytest.raises(AttributeError, match="call fit first"):
            ask()
    with pytest.raises(AttributeError, match="call fit first"):
        session.score(X, Y)
    session.fit(X, Y)
    assert [a.shape for a in arrays(session.get_state())] == [(3, 1), (1,)]
    same(session.trained_coef_, session.get_state())


def test_kinds_of_state() -> None:
    inside = fitted("inside").get_state()
    assert {n: type(v) for n, v in inside.items()} == dict.fromkeys(NAMES, np.ndarray)
    session = fitted("beside", learning_rate=LearningRateSGDNesterov(0.01))
    full = session.get_full_state()
    assert full[0] is None
    assert [v.shape() for v in full[1:]] == [v.shape() for v in session.get_state()]
    weights, velocities = session.get_full_state(["weight", "grad"])
    same(weights[1:], session.get_state())
    assert not np.array_equal(arrays(velocities[1:])[0], arrays(weights[1:])[0])
    with pytest.raises(DataError, match="expected 'weight' or 'grad', got 'gradient'"):
        session.get_state("gradient")


@BOTH
def test_state_can_be_set(way: str) -> None:
    session, other = fitted(way, seed=1), fitted(way, seed=2)
    session.set_state(other.get_state())
    same(session.get_state(), other.get_state())
    assert session.score(X, Y) == other.score(X, Y)
    before = arrays(session.get_state())
    other.fit(X, Y)
    same(session.get_state(), before)


def test_state_is_set_by_copies_of_whatever_form() -> None:
    session = fitted("beside")
    new = [np.full((3, 1), 2, np.float32), np.full(1, 3, np.float32)]
    for form in (new, [None, *new], dict(zip(NAMES, new, strict=True))):
        session.set_state(form)
        same(session.get_state(), new)
    new[0][:] = 0
    assert session.get_state()[0].numpy().max() == 2
    session.set_state(new, zero=True)
    assert [a.max() for a in arrays(session.get_state())] == [0, 0]
    with pytest.raises(DataError, match="expected coef, intercept, got 1"):
        session.set_state(new[:1])
    with pytest.raises(DataError, match="did you mean 'coef'"):
        fitted("inside").set_state({"koef": new[0]})
    with pytest.raises(DataError, match=r"'coef' has shape \[3, 1\], got \[1\]"):
        fitted("inside").set_state({"coef": new[1]})


@BOTH
def test_warm_start_goes_on(way: str) -> None:
    model = models.linear(3)
    session = trainer(way, warm_start=True, max_iter=0)
    session.fit(X, Y)
    same(session.get_state(), {n: a for n, (a, _) in api.get_train_initializer(model).items()})
    session.set_params(max_iter=3)
    first = session.fit(X, Y).train_losses_
    second = session.fit(X, Y).train_losses_
    assert second[0] < first[-1] < first[0]
    session.set_params(warm_start=False)
    np.random.seed(0)
    assert session.fit(X, Y).train_losses_ == fitted(way, max_iter=3).train_losses_


@BOTH
def test_the_trained_model_predicts(way: str) -> None:
    session = fitted(way)
    coef, intercept = arrays(session.get_state())
    y = models.predict(session.get_trained_onnx(model=models.linear(3)), {"X": X})["Y"]
    np.testing.assert_allclose(y, X @ coef + intercept, rtol=1e-5, atol=1e-5)
    own = models.weights_of(session.get_trained_onnx())
    np.testing.assert_array_equal(own["coef"], coef)
    with pytest.raises(ModelError, match="no initializer 'coef'"):
        session.get_trained_onnx(model=models.mlp())


@BOTH
def test_pickles_go_on_where_they_were(way: str) -> None:
    nesterov = {"learning_rate": "Nesterov", "learning_penalty": ElasticLearningPenalty(0, 0.01)}
    options: dict[str, Any] = {"warm_start": True} | (nesterov if way == "beside" else {})
    session = fitted(way, **options)
    twin = pickle.loads(pickle.dumps(session))
    same(twin.get_state(), session.get_state())
    assert twin.train_losses_ == session.train_losses_
    assert twin.score(X, Y) == session.score(X, Y)
    assert repr(twin) == repr(session)
    if way == "beside":
        same(twin.get_state("grad"), session.get_state("grad"))
    losses = []
    for one in (session, twin):
        np.random.seed(9)
        losses.append(one.fit(X, Y).train_losses_)
    assert losses[0] == losses[1]
    fresh = pickle.loads(pickle.dumps(trainer(way)))
    with pytest.raises(AttributeError, match="call fit first"):
        fresh.get_state()
    fresh.fit(X, Y)


@BOTH
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_score_are_of_all_rows_in_order(way: str, weighted: bool) -> None:
    np.random.seed(0)
    w = W if weighted else None
    session = trainer(way, weighted).fit(X, Y, w)
    coef, intercept = arrays(session.get_state())
    rows = (X @ coef + intercept - Y)[:, 0] ** 2 * (1 if w is None else w)
    np.testing.assert_allclose(session.losses(X, Y, w), rows, rtol=1e-4, atol=1e-5)
    assert session.score(X, Y, w) == pytest.approx(-rows.mean(), rel=1e-5)


@BOTH
def test_validation(way: str) -> None:
    session = trainer(way, max_iter=20)
    assert session.validation_every == 2
    np.random.seed(0)
    session.fit(X, Y, X_val=X[:7], y_val=Y[:7])
    assert len(session.validation_losses_) == 10
    factor = 1 if way == "inside" else 0.5  # the loss next to the graph is half the square
    last = -factor * session.score(X[:7], Y[:7])
    assert session.validation_losses_[-1] == pytest.approx(last, rel=1e-5)
    with_a_number = trainer(way, max_iter=20, validation_every=5)
    with_a_number.fit(X, Y, X_val=X, y_val=Y)
    assert len(with_a_number.validation_losses_) == 4
    assert trainer(way, max_iter=3).validation_every == 1
    assert fitted(way).validation_losses_ == ([] if way == "inside" else None)


def test_validation_of_a_model_with_sample_weights() -> None:
    session = trainer("inside", weighted=True, max_iter=10)
    session.fit(X, Y, W, X_val=X, y_val=Y)
    last = -session.score(X, Y, np.ones(ROWS))
    assert session.validation_losses_[-1] == pytest.approx(last, rel=1e-6)


def test_graphs_can_be_saved(tmp_path: Path) -> None:
    session = fitted("beside", learning_penalty=ElasticLearningPenalty(0, 0.01))
    saved = session.save_onnx_graph(bytes)
    assert {"model_onnx", "learning_rate", "learning_loss", "learning_penalty"} <= set(saved)
    assert set(saved["learning_loss"]) == {"loss_grad_onnx_", "loss_score_onnx_"}
    assert set(saved["learning_rate"]) == {"axpy_onnx_"}
    assert set(saved["train_function_"]) == {"_trained_onnx", "_optimized_pre_grad_model"}
    onnx.load_model_from_string(saved["train_function_"]["_trained_onnx"])
    assert "train_session_" not in saved, "its graphs are those of the function"
    by_hand = session.train_session_.new_instance().save_onnx_graph(bytes)
    assert by_hand == saved["train_function_"]
    files = session.learning_loss.save_onnx_graph(str(tmp_path))
    assert sorted(Path(f).name for f in files.values()) == [
        "SquareLLoss.loss_grad_onnx_.onnx",
        "SquareLLoss.loss_score_onnx_.onnx",
    ]
    inside = fitted("inside").save_onnx_graph(str(tmp_path))
    assert Path(inside["model_onnx"]).name == "GradOptimizer.model_onnx.onnx"
    onnx.checker.check_model(onnx.load(inside["train_session_"]["evaluation_onnx_"]))


def test_saved_gradient(tmp_path: Path) -> None:
    path = tmp_path / "gradient.onnx"
    fitted("inside", saved_gradient=str(path))
    for file in (path, tmp_path / "gradient.onnx.training.onnx"):
        graph = onnx.load(file).graph
        assert len(graph.node) > 4
    outputs = [o.name for o in onnx.load(path).graph.output]
    assert outputs == ["loss", "Y", "gradient/coef", "gradient/intercept"]


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "onnxcustom"):
        fitted("beside", enable_logging=True)
    assert "weights_to_train=['coef', 'intercept']" in caplog.text
    assert "_iteration] loss=" in caplog.text


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for way in ("inside", "beside"):
        fitted(way, verbose=1)
        assert "training" in capsys.readouterr().out


@BOTH
def test_parameters(way: str) -> None:
    session = trainer(way)
    params = session.get_params()
    assert params["device"] == "cpu"
    assert params["max_iter"] == 4
    assert isinstance(params["learning_rate"], LearningRateSGD)
    assert session.set_params(learning_rate="SGD", max_iter=7) is session
    assert (session.learning_rate.eta0, session.max_iter) == (0.01, 7)
    with pytest.raises(ValueError, match="did you mean 'max_iter'"):
        session.set_params(maxiter=3)
    text = repr(session)
    assert text.startswith(f"{type(session).__name__}(model_onnx=")
    assert "learning_rate='invscaling'" in text


@BOTH
@pytest.mark.filterwarnings("ignore:One or more of the test scores are non-finite")
def test_grid_search(way: str) -> None:
    pytest.importorskip("sklearn")
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV

    session = trainer(way, max_iter=40)
    copy = clone(session)
    assert copy.get_params()["learning_rate"].eta0 == 0.05
    grid = {"learning_rate": [LearningRateSGD(r) for r in (1e-6, 0.05)]}
    if way == "beside":
        session.set_params(exc=False)
        grid["learning_rate"].append(LearningRateSGD(1e3))
        grid["learning_loss"] = ["square_error", "elastic_error"]
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, about what is not finite
        search = GridSearchCV(session, grid, cv=3, error_score="raise").fit(X, Y)
    assert search.best_params_["learning_rate"].eta0 == 0.05
    assert search.best_estimator_.score(X, Y) > -0.1
