"""What the older API refuses, and forward and backward by hand."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest

import ortflex_plugins.onnxcustom as api
from ortflex_core import ConfigError, DataError, ModelError, Plugins, Unsupported, require_runtime
from ortflex_plugins.onnxcustom import (
    ConvergenceError,
    ConvergenceWarning,
    LearningRateSGD,
    LearningRateSGDNesterov,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    add_loss_output,
    onnx_rename_weights,
)
from tests import children, models
from tests.plugins.onnxcustom_regression import BOTH, NAMES, ROWS, W, X, Y, fitted, trainer

RNG = np.random.default_rng(12)
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
        (ValueError, lambda: LearningRateSGD(eta0="0.1"), "eta0: .* a number >= 0, got '0.1'"),
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


def test_forward_and_backward_take_anything() -> None:
    from ortflex_plugins.onnxcustom.devices import own_vector

    model = models.linear(3)
    made = OrtGradientForwardBackward(model, debug=True)
    cls = made.cls_type_
    assert cls._onx_inp == cls._grad_input_names == ["X", "coef", "intercept"]
    assert cls._onx_out == cls._bw_fetches_names == ["X_grad", "coef_grad", "intercept_grad"]
    assert (cls._input_names, cls._output_names) == (["X"], ["Y"])
    assert cls._weights_to_train == NAMES
    coef, intercept = (made.get_initializer(n) for n in NAMES)
    given = [X, coef, intercept]
    values = [api.numpy_to_ort_value(a) for a in given]
    seed = RNG.standard_normal((ROWS, 1)).astype(np.float32)
    for form in (given, values, own_vector(values)):
        instance = made.new_instance()
        expected = X @ coef + intercept
        for training in (False, True):
            [out] = [v.numpy() for v in instance.forward(form, training=training)]
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        found = [v.numpy() for v in instance.backward([seed])]
        for a, b in zip(found, [seed @ coef.T, X.T @ seed, seed.sum(0)], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    twin = pickle.loads(pickle.dumps(made))
    assert repr(twin) == "OrtGradientForwardBackward(...)"
    assert twin.new_instance().forward(given)[0].shape() == [ROWS, 1]


def test_several_passes_wait_and_outputs_outlive_the_way_back() -> None:
    instance = OrtGradientForwardBackward(onnx_rename_weights(models.mlp((3, 4, 1)))).new_instance()
    weights = [a for a, _ in api.get_train_initializer(models.mlp((3, 4, 1))).values()]
    ones = np.ones((ROWS, 1), np.float32)
    first = instance.forward([X, *weights], training=True)
    before = first[0].numpy().copy()
    second = instance.forward([2 * X, *weights], training=True)
    gradients_of_second = instance.backward([ones])[0].numpy().copy()
    gradients_of_first = instance.backward([ones])[0].numpy().copy()
    np.testing.assert_array_equal(first[0].numpy(), before)
    assert not np.allclose(second[0].numpy(), before)
    w1, b1, w2, _ = (w.astype(np.float64) for w in weights)
    for x, found in ((X, gradients_of_first), (2 * X, gradients_of_second)):
        h = np.tanh(x @ w1 + b1)
        np.testing.assert_allclose(found, (1 - h**2) * w2.T @ w1.T, rtol=1e-4, atol=1e-5)


def test_forward_and_backward_say_what_is_missing() -> None:
    instance = OrtGradientForwardBackward(models.linear(3)).new_instance()
    with pytest.raises(RuntimeError, match="there is no saved forward pass"):
        instance.backward([Y])
    with pytest.raises(DataError, match=r"inputs: expected 3 \(X, coef, intercept\), got 1"):
        instance.forward([X])
    with pytest.raises(DataError, match="inputs: 'coef' is None"):
        instance.forward([X, None, None])
    with pytest.raises(ConfigError, match="expected some of CPUExecutionProvider"):
        OrtGradientForwardBackward(models.linear(3), providers=["NONE"])


@pytest.mark.parametrize("training", [True, False])
def test_weights_and_gradients_have_their_shapes(training: bool) -> None:
    function = OrtGradientForwardBackward(models.linear(3)).new_instance()
    coef, intercept = np.ones((3, 1), np.float32), np.ones(1, np.float32)
    with pytest.raises(DataError, match=r"'coef' has shape \[3\], the initializer has \[3, 1\]"):
        function.forward([X, coef[:, 0], intercept], training)
    if training:
        function.forward([X, coef, intercept], True)
        with pytest.raises(DataError, match=r"'Y' has shape \[1, 1\], the output has \[33, 1\]"):
            function.backward([Y[:1]])


def test_large_frozen_tensors_are_fed() -> None:
    model = models.mlp((40, 60, 1))
    x = RNG.standard_normal((9, 40)).astype(np.float32)
    y = x[:, :1]
    names = ["W2", "b2"]
    session = OrtGradientForwardBackwardOptimizer(model, names, max_iter=40, learning_rate=0.02)
    session.fit(x, y)
    inside = OrtGradientOptimizer(add_loss_output(model), names, max_iter=40, learning_rate=0.02)
    inside.fit(x, y)
    w1, b1 = (api.get_train_initializer(model)[n][0] for n in ("W1", "b1"))
    for one in (session, inside):
        state = one.trained_coef_
        w2, b2 = (np.array(state[n] if one is inside else state[n].numpy()) for n in names)
        rows = (np.tanh(x @ w1 + b1) @ w2 + b2 - y)[:, 0] ** 2
        np.testing.assert_allclose(one.losses(x, y), rows, rtol=1e-3, atol=1e-4)
        assert one.train_losses_[-1] < one.train_losses_[0]


def test_the_logging_of_the_process_is_left_alone() -> None:
    if not require_runtime().has_training_session:
        pytest.skip("it is the import of TrainingSession that sets it up")
    lines = (
        "import logging; root = logging.getLogger(); before = root.level, list(root.handlers)\n"
        "from ortflex_plugins.backends.training_session import native_session\n"
        "assert native_session().__name__ == 'TrainingSession'\n"
        "assert (root.level, list(root.handlers)) == before, (root.level, root.handlers)\n"
    )
    done = children.run([sys.executable, "-c", lines])
    assert done.returncode == 0, done.stderr
