"""The parts of the older API: losses, penalties, rates, bindings; and what the API refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest

import ortflex_plugins.onnxcustom as api
from ortflex_core import DataError, ModelError, Plugins, Unsupported, require_runtime
from ortflex_plugins.onnxcustom import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    BaseLearningOnnx,
    BaseLearningPenalty,
    BaseLearningRate,
    ConvergenceError,
    ConvergenceWarning,
    ElasticLearningLoss,
    ElasticLearningPenalty,
    LearningRateSGD,
    LearningRateSGDNesterov,
    NegLogLearningLoss,
    NoLearningPenalty,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    SquareLearningLoss,
    add_loss_output,
    numpy_to_ort_value,
)
from ortflex_plugins.onnxcustom.devices import borrowed
from tests import models
from tests.plugins.onnxcustom_regression import BOTH, NAMES, ROWS, W, X, Y, fitted, trainer

RNG = np.random.default_rng(11)
FEW = 7
P = RNG.standard_normal((FEW, 1)).astype(np.float32)
TARGETS = RNG.standard_normal((FEW, 1)).astype(np.float32)
CLASSES = RNG.integers(0, 2, (FEW, 1))
FACTORS = RNG.uniform(0.5, 2, FEW).astype(np.float32)


def clipped(s: Any, eps: float) -> Any:
    return np.clip(1 / (1 + np.exp(-s.astype(np.float64))), eps, 1 - eps)


# name: (loss, value of a row, gradient, factor of sum and gradient)
LOSSES = {
    "square": (SquareLearningLoss(), lambda p, y: (p - y) ** 2, lambda p, y: 2 * (p - y), 0.5),
    "absolute": (
        AbsoluteLearningLoss(),
        lambda p, y: np.abs(p - y),
        lambda p, y: np.sign(p - y),
        1.0,
    ),
    "elastic": (
        ElasticLearningLoss(l1_weight=0.1, l2_weight=0.9),
        lambda p, y: 0.1 * np.abs(p - y) + 0.9 * (p - y) ** 2,
        lambda p, y: 0.1 * np.sign(p - y) + 1.8 * (p - y),
        1.0,
    ),
    "log": (
        NegLogLearningLoss(eps=0.3),  # some of the probabilities are clipped
        lambda p, y: -(1 - y) * np.log(1 - clipped(p, 0.3)) - y * np.log(clipped(p, 0.3)),
        lambda p, y: clipped(p, 0.3) - y,
        1.0,
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_and_scores_are_those_of_numpy(name: str, weighted: bool) -> None:
    loss, value, slope, factor = LOSSES[name]
    loss = copy.deepcopy(loss)
    loss.build_onnx_function(15, "cpu", "weight" if weighted else None)
    y = CLASSES if name == "log" else TARGETS
    expected, predicted, weight = map(numpy_to_ort_value, (y, P, FACTORS))
    w = FACTORS[:, None].astype(np.float64) if weighted else np.ones((FEW, 1))
    given = {"weight": weight} if weighted else {}
    total, gradient = loss.loss_gradient("cpu", expected, predicted, **given)
    p64 = P.astype(np.float64)
    rows = w * value(p64, y)
    np.testing.assert_allclose(total.numpy(), [factor * rows.sum()], rtol=1e-5)
    np.testing.assert_allclose(gradient.numpy(), factor * w * slope(p64, y), rtol=1e-5, atol=1e-6)
    scores = loss.loss_scores("cpu", expected, predicted, **given)
    np.testing.assert_allclose(scores.numpy(), rows, rtol=1e-5, atol=1e-6)


def built(weight: str | None) -> SquareLearningLoss:
    loss = SquareLearningLoss()
    loss.build_onnx_function(15, "cpu", weight)
    return loss


def test_a_result_is_not_changed_by_the_next_one() -> None:
    loss = built(None)
    zero, ones, threes = (np.full((3, 1), v, np.float32) for v in (0, 1, 3))
    first = loss.loss_gradient("cpu", zero, ones)
    second = loss.loss_gradient("cpu", zero, threes)
    assert [v.numpy().item(0) for v in (*first, *second)] == [1.5, 1, 13.5, 3]


def test_a_loss_with_weights_takes_none_for_ones_and_one_without_refuses_them() -> None:
    for given, weight in (((FACTORS,), FACTORS), ((), 1.0)):
        total, _ = built("weight").loss_gradient("cpu", TARGETS, P, *given)
        wanted = (weight * (P - TARGETS)[:, 0] ** 2).sum() / 2
        assert total.numpy()[0] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(RuntimeError, match="call build_onnx_function first"):
        SquareLearningLoss().loss_gradient("cpu", TARGETS, P)
    with pytest.raises(ValueError, match=r"build_onnx_function\(opset, device, 'weight'\)"):
        built(None).loss_gradient("cpu", TARGETS, P, FACTORS)


@pytest.mark.parametrize("part", [LOSSES["elastic"][0], LearningRateSGDNesterov(0.5)])
def test_pickles_build_their_graphs_again(part: Any) -> None:
    part = copy.deepcopy(part)
    part.build_onnx_function(15, "cpu", "weight" if isinstance(part, BaseLearningLoss) else 2)
    twin = pickle.loads(pickle.dumps(part))
    assert repr(twin) == repr(part)
    assert twin.save_onnx_graph(bytes) == part.save_onnx_graph(bytes) != {}


def test_select() -> None:
    assert isinstance(BaseLearningLoss.select("square_error"), SquareLearningLoss)
    assert isinstance(BaseLearningLoss.select("absolute_error"), AbsoluteLearningLoss)
    assert BaseLearningLoss.select("elastic_error", l2_weight=2).l2_weight == 2  # type: ignore[attr-defined]
    assert BaseLearningLoss.select("logloss", eps=0.1).eps == 0.1  # type: ignore[attr-defined]
    assert isinstance(BaseLearningPenalty.select(None), NoLearningPenalty)
    assert BaseLearningPenalty.select("l1l2", l1=3).l1 == 3  # type: ignore[attr-defined]
    assert isinstance(BaseLearningRate.select("SGD"), LearningRateSGD)
    assert BaseLearningRate.select("Nesterov", momentum=0.5).momentum == 0.5  # type: ignore[attr-defined]
    assert BaseLearningRate.select(0.25).eta0 == 0.25  # type: ignore[attr-defined]
    loss = SquareLearningLoss()
    assert BaseLearningLoss.select(loss) is loss


@pytest.mark.parametrize(
    ("base", "name"),
    [(BaseLearningLoss, "squar"), (BaseLearningPenalty, "elstic"), (BaseLearningRate, "SGDD")],
)
def test_select_names_what_was_meant(base: Any, name: str) -> None:
    with pytest.raises(ValueError, match="did you mean"):
        base.select(name)


def test_base_classes_ask_for_their_methods() -> None:
    for base in (BaseLearningOnnx, BaseLearningRate, BaseLearningPenalty):
        with pytest.raises(NotImplementedError, match="is not implemented"):
            base().build_onnx_function(15, "cpu", 1)
    with pytest.raises(NotImplementedError, match="component"):
        BaseLearningLoss().build_onnx_function(15, "cpu", None)


class Counting:
    """Counts what onnxruntime would get."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.calls.append((name, value.data_ptr()))

    bind_ortvalue_output = bind_ortvalue_input

    def bind_input(self, name: str, device: Any, dtype: Any, shape: Any, pointer: int) -> None:
        self.calls.append((name, pointer))

    def clear_binding_inputs(self) -> None:
        self.calls.append("clear")


@pytest.mark.parametrize("way", ["input", "output"])
def test_the_same_pointer_is_not_bound_again(way: str) -> None:
    owner, bind = SquareLearningLoss(), Counting()
    array, *others = (np.zeros((4, 2), np.float32) for _ in range(3))

    def tell(value: Any, cache: bool = True, target: Any = bind, name: str = "X") -> int:
        if way == "input":
            owner._bind_input_ortvalue(name, target, value, "cpu", cache=cache)
        else:
            owner._bind_output_ortvalue(name, target, value, cache=cache)
        return len(target.calls)

    assert tell(borrowed(array)) == 1
    assert tell(borrowed(array)) == 1, "another OrtValue with the same pointer"
    assert tell(borrowed(array[:2])) == 2, "the same pointer in another shape"
    assert tell(borrowed(others[0])) == 3
    assert tell(borrowed(others[1]), name="other") == 4
    assert tell(borrowed(array), target=Counting()) == 1, "another binding"
    value = borrowed(array)
    assert [tell(value, cache=False), tell(value, cache=False), tell(value)] == [5, 6, 6]


def test_arrays_are_bound_by_their_pointer_too() -> None:
    owner, bind = SquareLearningLoss(), Counting()
    array = np.zeros((4, 2), np.float32)
    for _ in range(3):
        owner._bind_input_ortvalue("X", bind, array, "cpu", cache=True)
    assert bind.calls == [("X", array.ctypes.data)]
    owner.clear_binding_inputs("Y", bind, cache=True)
    assert len(bind.calls) == 1, "Y is not bound"
    owner.clear_binding_inputs("X", bind, cache=True)
    owner._bind_input_ortvalue("X", bind, array, "cpu", cache=True)
    assert bind.calls[1:] == ["clear", ("X", array.ctypes.data)]
    with pytest.raises(TypeError, match="'X': expected an OrtValue, got list"):
        owner._bind_input_ortvalue("X", bind, [1.0], "cpu")
    with pytest.raises(TypeError, match="'X': expected an OrtValue, got ndarray"):
        owner._bind_output_ortvalue("X", bind, array)


def test_what_is_bound_stays_alive_until_something_else_is() -> None:
    loss, bind = SquareLearningLoss(), Counting()
    first, second = np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32)
    alive = weakref.ref(first)
    loss._bind_input_ortvalue("X", bind, first, "cpu", cache=True)
    del first
    gc.collect()
    assert alive() is not None, "onnxruntime has its pointer"
    loss._bind_input_ortvalue("X", bind, second, "cpu", cache=True)
    gc.collect()
    assert alive() is None


def test_penalty_costs_and_shrinks() -> None:
    penalty = ElasticLearningPenalty(l1=0.1, l2=0.3)
    penalty.build_onnx_function(15, "cpu", 2)
    first, second = np.array([[1.0, -2.0]], np.float32), np.array([3.0], np.float32)
    loss = numpy_to_ort_value(np.array([5.0], np.float32))
    values = [numpy_to_ort_value(a.copy()) for a in (first, second)]
    total = penalty.penalty_loss("cpu", loss, *values)
    np.testing.assert_allclose(total.numpy(), [5 + 0.1 * 6 + 0.3 * 14], rtol=1e-6)
    for k, (value, old) in enumerate(zip(values, (first, second), strict=True)):
        assert penalty.update_weights(k, "cpu", value) is value
        np.testing.assert_allclose(value.numpy(), 0.4 * old - 0.1 * np.sign(old), rtol=1e-6)
    with pytest.raises(ValueError, match="was built for 2 weights, got 1"):
        penalty.penalty_loss("cpu", loss, values[0])


def test_rates() -> None:
    def values(**options: Any) -> list[float]:
        return list(LearningRateSGD(0.1, **options).loop(5))

    t = np.arange(5)
    np.testing.assert_allclose(values(), 0.1 / (t + 1.0) ** 0.25)
    np.testing.assert_allclose(values(power_t=0.5), 0.1 / np.sqrt(t + 1))
    assert values(learning_rate="constant") == [0.1] * 5
    typical = 0.01**-0.25
    t0 = 1 / (0.01 * typical / (2 * (1 + typical)))
    optimal = values(learning_rate="optimal", alpha=0.01)
    np.testing.assert_allclose(optimal, 0.1 * t0 / (t0 + t), rtol=1e-12)
    with pytest.raises(ValueError, match="did you mean 'invscaling'"):
        LearningRateSGD(learning_rate="invscale")
    with pytest.raises(RuntimeError, match="call init_learning_rate first"):
        _ = LearningRateSGD().value


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("nesterov", [None, False, True])
def test_update_in_place(nesterov: bool | None, rank: int) -> None:
    rate = LearningRateSGD(0.5)
    if nesterov is not None:
        rate = LearningRateSGDNesterov(0.5, momentum=0.8, nesterov=nesterov)
    rate.build_onnx_function(15, "cpu", 1)
    rate.init_learning_rate()
    shape = (3, 2)[:rank]
    w, g, v = (np.asarray(RNG.standard_normal(shape), np.float32) for _ in range(3))
    weight, velocity = (numpy_to_ort_value(a.copy()) for a in (w, v))
    w, v = w.astype(np.float64), v.astype(np.float64)
    for _ in range(3):
        given = {} if nesterov is None else {"velocity": velocity}
        rate.update_weights(0, "cpu", weight, numpy_to_ort_value(g), 10, **given)
        v = (0.8 * v if nesterov is not None else 0) - 0.05 * g
        w = w + (0.8 * v - 0.05 * g if nesterov else v)
    np.testing.assert_allclose(weight.numpy(), w, rtol=1e-5)
    if nesterov is not None:
        np.testing.assert_allclose(velocity.numpy(), v, rtol=1e-5)


def test_velocities_belong_to_nesterov() -> None:
    value = numpy_to_ort_value(np.ones(2, np.float32))
    rate: LearningRateSGD = LearningRateSGD()
    with pytest.raises(RuntimeError, match="has no velocity"):
        rate.update_weights(0, "cpu", value, value, 10, value)
    rate = LearningRateSGDNesterov()
    with pytest.raises(RuntimeError, match="needs a velocity"):
        rate.update_weights(0, "cpu", value, value, 10)


SIGNS = np.where(np.arange(ROWS) == 2, -1, 1)


@BOTH
@pytest.mark.parametrize("use_numpy", [False, True])
def test_divergence_is_an_error(way: str, use_numpy: bool) -> None:
    session = trainer(way, max_iter=100, learning_rate=1e4)
    options = {"use_numpy": use_numpy} if way == "inside" else {}
    np.random.seed(0)
    with pytest.raises(ConvergenceError, match=r"A smaller learning.rate may help"):
        session.fit(X, Y, **options)


def test_divergence_may_be_a_warning() -> None:
    session = trainer("beside", max_iter=30, learning_rate=1e4, exc=False)
    with pytest.warns(ConvergenceWarning, match="the gradient descent has failed"):
        session.fit(X, Y)
    assert np.isnan(session.train_losses_[-1])


@BOTH
def test_only_sgd(way: str) -> None:
    with pytest.raises(NotImplementedError, match="expected 'SGDOptimizer', got 'AdamOptimizer'"):
        fitted(way, training_optimizer_name="AdamOptimizer")


def beside(model: Any, names: list[str], **options: Any) -> Any:
    return OrtGradientForwardBackwardOptimizer(model, names, **options).fit(X, Y)


def inside(model: Any, names: list[str], **options: Any) -> Any:
    return OrtGradientOptimizer(model, names, **options).fit(X, Y)


VELOCITY, LOG = {"learning_rate": "Nesterov"}, {"learning_loss": "log"}
OPTIMAL: dict[str, Any] = {"alpha": 0, "learning_rate": "optimal"}
TWO, SHAPES = Y.repeat(2, axis=1), [np.ones((3, 1), np.float32), np.ones(2, np.float32)]
MLP = models.mlp((3, 2, 1))


@pytest.mark.parametrize(
    ("error", "call", "text"),
    [
        (NotImplementedError, lambda: trainer("inside", **VELOCITY), "SGDNesterov needs one"),
        (NotImplementedError, lambda: trainer("inside").set_params(**VELOCITY), "needs one"),
        (DataError, lambda: trainer("inside").fit(X, Y, W), "the model has no input for it"),
        (DataError, lambda: trainer("inside", weighted=True).fit(X, Y), "requires sample weights"),
        (DataError, lambda: trainer("beside").fit(X, Y[1:]), "X has 33 rows, y has 32"),
        (DataError, lambda: trainer("inside").fit(X, Y, X_val=X), "X_val and y_val: expected both"),
        (DataError, lambda: trainer("beside").fit(X, Y, X_val=X), "X_val and y_val: expected both"),
        (DataError, lambda: trainer("beside").fit(X, TWO), r"predicts \[10, 1\], but .* \[10, 2\]"),
        (ModelError, lambda: beside(MLP, sorted(models.weights_of(MLP))), "onnx_rename_weights"),
        (ValueError, lambda: beside(MLP, ["A"]), "'A' is not a float initializer"),
        (ModelError, lambda: inside(MLP, ["W1"], loss_output_name="Y"), "have the inputs X, label"),
        (ModelError, lambda: inside(MLP, ["W1"]), "add_loss_output"),
        (ModelError, lambda: beside(models.two_headed(), ["shared"]), "but has left, right"),
        (DataError, lambda: trainer("beside", **LOG).fit(X, SIGNS), r"the class -1 \(row 2\), but"),
        (DataError, lambda: trainer("beside", **LOG).fit(X, Y), r"float32.*astype\('int64'\)"),
        (DataError, lambda: fitted("inside").set_state([1.0]), "names coef, intercept, got list"),
        (DataError, lambda: fitted("beside").set_state({"coeff": Y}), "did you mean 'coef'"),
        (DataError, lambda: fitted("beside").set_state(SHAPES), r"shape \[1\], got \[2\]"),
        (TypeError, lambda: fitted("beside").save_onnx_graph(None), "expected a path, or .*bytes"),
        (ValueError, lambda: LearningRateSGD(**OPTIMAL), "alpha: expected a number > 0"),
        (ValueError, lambda: LearningRateSGD(power_t=float("inf")), "power_t: expected a number"),
        (ValueError, lambda: LearningRateSGDNesterov(momentum=-0.5), "momentum: .* number >= 0"),
        (TypeError, lambda: LearningRateSGD(eta0="0.1"), "eta0: .* a number >= 0, got '0.1'"),
        (TypeError, lambda: add_loss_output("model.onnx"), "onx: .* onnx.ModelProto, got str"),
        (TypeError, lambda: api.onnx_derivative(b""), "onx: .* an onnx.ModelProto, got bytes"),
        (TypeError, lambda: api.onnx_rename_weights(None), "onx: .* onnx.ModelProto, got NoneType"),
        (TypeError, lambda: OrtGradientForwardBackward("a"), "onnx_model: .* an onnx.ModelProto"),
        (TypeError, lambda: add_loss_output(MLP, penalty="l2"), r"\{initializer: .*got 'l2'"),
    ],
)
def test_what_does_not_fit_is_refused(error: Any, call: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@BOTH
def test_float64_data_are_taken(way: str) -> None:
    losses = []
    for x, y in ((X, Y), (X.astype(np.float64), Y[:, 0].astype(np.float64))):
        np.random.seed(0)
        losses.append(trainer(way).fit(x, y).train_losses_)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("learning_rate", [0.1, LearningRateSGDNesterov(0.05)])
def test_float64_models_are_trained(learning_rate: Any) -> None:
    model = models.in_float64(models.linear(3))
    options: dict[str, Any] = {"max_iter": 60, "learning_rate": learning_rate}
    assert beside(model, NAMES, **options).score(X, Y) > -1e-2
    if not isinstance(learning_rate, LearningRateSGDNesterov):
        session = inside(add_loss_output(model), NAMES, **options)
        assert session.score(X, Y) > -1e-2
        assert session.get_state()["coef"].dtype == np.float64


@BOTH
@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("batch_size", 0, "batch_size: expected an integer >= 1, got 0; the number of rows"),
        ("batch_size", "10", "batch_size: expected an integer >= 1, got '10'"),
        ("batch_size", True, "batch_size: expected an integer >= 1, got True"),
        ("max_iter", -1, "max_iter: expected an integer >= 0, got -1"),
        ("max_iter", 2.5, "max_iter: expected an integer >= 0, got 2.5"),
        ("validation_every", 0, "validation_every: expected an integer >= 1, got 0, or a fraction"),
        ("weights_to_train", "coef", "weights_to_train: expected a list of names, got 'coef'"),
        ("weights_to_train", [], "weights_to_train: expected at least one name of an initializer"),
        ("model_onnx", "model.onnx", r"expected an onnx.ModelProto, got str; onnx.load\(path\)"),
        ("learning_rate", {"name": "SGD"}, r"unknown learning rate \{'name': 'SGD'\}; Known: "),
        ("learning_rate", -0.1, "eta0: expected a number >= 0, got -0.1"),
        ("learning_rate", float("nan"), "eta0: expected a number >= 0, got nan"),
    ],
)
def test_arguments_that_cannot_be(way: str, option: str, value: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        trainer(way).set_params(**{option: value})


@BOTH
@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (X[:, :2], Y, r"X has shape \[33, 2\], but 'X' expects \[.*, 3\]"),
        (X[0], Y[:1], r"X has shape \[3\], but 'X' expects \[.*, 3\]"),
        (X[:0], Y[:0], r"[Xy] is empty: its shape is \[0, "),
        (np.where(X[4, 1] == X, np.nan, X), Y, r"X has a value that is not finite \(first in row"),
        (X, np.where(Y[7] == Y, np.inf, Y), r"y has a value that is not finite \(first in row 7"),
        (X, np.array(["a"] * ROWS), "y has type <U1, but 'label' expects float32"),
    ],
)
def test_data_that_cannot_be(way: str, x: Any, y: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        trainer(way).fit(x, y)


@BOTH
def test_sparse_matrices_are_named(way: str) -> None:
    sparse = pytest.importorskip("scipy.sparse").csr_matrix(X)
    with pytest.raises(DataError, match=r"X is a sparse matrix, expected an array: X.toarray\(\)"):
        trainer(way).fit(sparse, Y)


def test_a_device_that_is_not_there() -> None:
    if not Plugins.discover()["devices"].load("cuda").available(require_runtime()):
        pytest.skip("there is a GPU")
    for way in ("inside", "beside"):
        with pytest.raises(Unsupported, match="the device 'cuda' cannot be used: "):
            fitted(way, device="cuda")
