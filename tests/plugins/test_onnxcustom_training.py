"""The optimizers of the older API: weights and losses against the formulas in numpy; gradients by hand."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

import ortflex_plugins.onnxcustom as api
from ortflex_core import ConfigError, DataError, require_runtime
from ortflex_plugins.onnxcustom import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    BaseLearningPenalty,
    BaseLearningRate,
    ElasticLearningLoss,
    ElasticLearningPenalty,
    LearningRateSGD,
    LearningRateSGDNesterov,
    NegLogLearningLoss,
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    add_loss_output,
    get_train_initializer,
    numpy_to_ort_value,
    onnx_rename_weights,
)
from tests import children, models
from tests.plugins import onnxcustom_regression as data
from tests.training import make

RNG = np.random.default_rng(5)
ROWS, SIZE, ITERATIONS = 23, 5, 6
X = RNG.standard_normal((ROWS, 4)).astype(np.float32)
Y = (X[:, :1] - X[:, 1:2] + 0.1 * RNG.standard_normal((ROWS, 1))).astype(np.float32)
CLASSES = (Y > 0).astype(np.int64)
W = RNG.uniform(0.5, 1.5, ROWS).astype(np.float32)
LINEAR, MLP = (4, 1), (4, 3, 2, 1)


@attrs.frozen(kw_only=True)
class Descent:
    """The documented descent, in float64: a tanh network, and one number a row to be predicted.

    ``value`` and ``slope`` are the loss of a row and its derivative by the prediction.
    """

    value: Callable[[Any, Any], Any]
    slope: Callable[[Any, Any], Any]
    rate: Callable[[int], float] = lambda t: 0.1 / max(t, 1) ** 0.25
    mean: bool = False
    momentum: float | None = None
    nesterov: bool = True
    shrink: tuple[float, float] = (0.0, 0.0)
    penalty: tuple[float, float] = (0.0, 0.0)
    """(l1, l2) of all weights; ``shrink`` moves them whatever the rate is, ``penalty`` is in the loss."""

    def forward(self, weights: list[Any], x: Any) -> list[Any]:
        layers = [x.astype(np.float64)]
        for k in range(0, len(weights), 2):
            z = layers[-1] @ weights[k] + weights[k + 1]
            layers.append(np.tanh(z) if k + 2 < len(weights) else z)
        return layers

    def gradients(self, weights: list[Any], layers: list[Any], g: Any) -> list[Any]:
        found = []
        for k in range(len(weights) - 2, -1, -2):
            before = layers[k // 2]
            found += [g.sum(0), before.T @ g]
            g = (g @ weights[k].T) * (1 - before**2)
        return found[::-1]

    def cost(self, weights: list[Any], factors: tuple[float, float]) -> float:
        l1, l2 = factors
        return float(sum(l1 * np.abs(w).sum() + l2 * (w**2).sum() for w in weights))

    def run(self, weights: list[Any], y: Any, sample_weight: Any = None) -> tuple[Any, list[float]]:
        """(weights, losses): batches from ``numpy.random``'s global state, as the loader draws them."""
        w = np.ones((ROWS, 1)) if sample_weight is None else sample_weight[:, None].astype(float)
        velocities = [np.zeros_like(a) for a in weights]
        losses = []
        for t in range(ITERATIONS):
            batch_losses = []
            for _ in range(-(-ROWS // SIZE)):
                start = int(np.random.randint(0, ROWS - SIZE + 1))
                rows = slice(start, start + SIZE)
                layers = self.forward(weights, X[rows])
                p, label, wb = layers[-1], y[rows], w[rows]
                total = (wb * self.value(p, label)).sum() / (SIZE if self.mean else 1)
                g = wb * self.slope(p, label) / (SIZE if self.mean else 1)
                cost = self.cost(weights, self.penalty) + self.cost(weights, self.shrink)
                batch_losses.append((total + cost) / SIZE)
                grads = self.gradients(weights, layers, g)
                rate = self.rate(t) / SIZE
                weights = self.step(weights, grads, velocities, rate)
            losses.append(float(np.mean(batch_losses)))
        return weights, losses

    def step(self, weights: Any, grads: Any, velocities: Any, rate: float) -> list[Any]:
        out = []
        for k, (a, g) in enumerate(zip(weights, grads, strict=True)):
            g = g + self.penalty[0] * np.sign(a) + 2 * self.penalty[1] * a
            moved = (1 - 2 * self.shrink[1]) * a - self.shrink[0] * np.sign(a)
            if self.momentum is None:
                moved = moved - rate * g
            else:
                velocities[k] = self.momentum * velocities[k] - rate * g
                ahead = self.momentum * velocities[k] - rate * g
                moved = moved + (ahead if self.nesterov else velocities[k])
            out.append(moved)
        return out


def drawn(model: Any, seed: int) -> list[Any]:
    """The random weights that a training starts from, in the order of the file."""
    np.random.seed(seed)
    shapes = [a.shape for a, _ in get_train_initializer(model).values()]
    return [np.asarray(np.random.randn(*s)).astype(np.float32).astype(np.float64) for s in shapes]


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


SQUARE = {"value": lambda p, y: (p - y) ** 2, "slope": lambda p, y: 2 * (p - y)}
HALF = {"value": lambda p, y: (p - y) ** 2 / 2, "slope": lambda p, y: p - y}
ABSOLUTE = {"value": lambda p, y: np.abs(p - y), "slope": lambda p, y: np.sign(p - y)}
ELASTIC = {
    "value": lambda p, y: 0.1 * np.abs(p - y) + 0.9 * (p - y) ** 2,
    "slope": lambda p, y: 0.1 * np.sign(p - y) + 1.8 * (p - y),
}
LOG = {
    "value": lambda p, y: np.log1p(np.exp(-p)) + (1 - y) * p,
    "slope": lambda p, y: 1 / (1 + np.exp(-p)) - y,
}


def inside(graph: Any, names: list[str], **options: Any) -> Any:
    options = {"max_iter": ITERATIONS, "batch_size": SIZE, "learning_rate": 0.1, **options}
    return OrtGradientOptimizer(graph, names, **options)


@pytest.mark.parametrize("use_numpy", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("sizes", "score", "formula"),
    [(LINEAR, "squared_error", SQUARE), (LINEAR, "l1", ABSOLUTE), (MLP, "elastic", ELASTIC)],
)
def test_descent_with_the_loss_inside(
    sizes: Any, score: str, formula: Any, weighted: bool, use_numpy: bool
) -> None:
    model = models.mlp(sizes)
    names = list(get_train_initializer(model))
    options = {"l1_weight": 0.1, "l2_weight": 0.9} if score == "elastic" else {}
    penalty = {n: {"l1": 0.02, "l2": 0.1} for n in names}
    weight = "weight" if weighted else None
    graph = add_loss_output(model, score, weight_name=weight, penalty=penalty, **options)
    w = W if weighted else None
    expected = Descent(**formula, penalty=(0.02, 0.1))
    weights, losses = expected.run(drawn(model, 3), Y, w)
    trainer = inside(graph, names, learning_rate=LearningRateSGD(0.1))
    np.random.seed(3)
    assert trainer.fit(X, Y[:, 0], w, use_numpy=use_numpy) is trainer
    same(trainer.train_losses_, losses)
    same([trainer.get_state()[n] for n in names], weights)
    same([trainer.trained_coef_[n] for n in names], weights)


@pytest.mark.parametrize("schedule", ["constant", "optimal"])
def test_schedules_of_a_whole_descent(schedule: str) -> None:
    model = models.mlp(LINEAR)
    names = list(get_train_initializer(model))
    t0 = 2 * (1 + 0.01**-0.25) / 0.01**0.75
    rates = {"constant": lambda t: 0.1, "optimal": lambda t: 0.1 * t0 / (t0 + max(t - 1, 0))}
    weights, losses = Descent(**SQUARE, rate=rates[schedule]).run(drawn(model, 4), Y)
    rate = LearningRateSGD(0.1, alpha=0.01, learning_rate=schedule)
    trainer = inside(add_loss_output(model), names, learning_rate=rate)
    np.random.seed(4)
    trainer.fit(X, Y)
    same(trainer.train_losses_, losses)
    same(trainer.get_state().values(), weights)


def test_log_loss_is_a_mean_and_divided_once_more() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] X) => (float[N, 2] probabilities)
        <float[4, 1] coef = {0, 0, 0, 0}, float[1] intercept = {0}, float[1] one = {1}>
        { p = MatMul(X, coef) s = Add(p, intercept) p1 = Sigmoid(s) p0 = Sub(one, p1)
          probabilities = Concat<axis = 1>(p0, p1) }"""
    )
    names = ["coef", "intercept"]
    graph = add_loss_output(model, "log", weight_name="weight")
    np.random.seed(6)
    start = [np.random.randn(4, 1), np.random.randn(1)]
    weights, losses = Descent(**LOG, mean=True).run(start, CLASSES, W)
    trainer = inside(graph, names)
    np.random.seed(6)
    trainer.fit(X, CLASSES, W)
    same(trainer.train_losses_, losses)
    same([trainer.get_state()[n] for n in names], weights)


def test_a_trainer_does_the_same() -> None:
    model = models.mlp(MLP)
    names = list(get_train_initializer(model))
    graph = add_loss_output(model, penalty={"W1": {"l1": 0.2, "l2": 0.5}})
    rate = LearningRateSGD(0.1, learning_rate="constant")
    options = {"batch_size": ROWS, "max_iter": 8, "learning_rate": rate, "warm_start": True}
    old = inside(graph, names, **options).fit(X, Y)
    settings = {"backend": "fused", "learning_rate": 0.1, "batch_size": ROWS, "epochs": 8}
    new = make(model, penalty={"W1": {"l1": 0.2 / ROWS, "l2": 0.5 / ROWS}}, **settings)
    new.fit(X, Y)
    same(old.train_losses_, new.train_losses_)
    same(old.get_state().values(), new.get_state().values())


def forward_backward(sizes: Any, y: Any, weight: Any, seed: int, **options: Any) -> Any:
    model = onnx_rename_weights(models.mlp(sizes))
    options = {"max_iter": ITERATIONS, "batch_size": SIZE, "learning_rate": 0.1, **options}
    trainer = OrtGradientForwardBackwardOptimizer(model, **options)
    np.random.seed(seed)
    assert trainer.fit(X, y, weight) is trainer
    return trainer


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("loss", "formula", "y"),
    [
        ("square_error", HALF, Y),
        (AbsoluteLearningLoss(), ABSOLUTE, Y),
        (ElasticLearningLoss(l1_weight=0.1, l2_weight=0.9), ELASTIC, Y),
        (NegLogLearningLoss(), LOG, CLASSES),
    ],
    ids=["square", "absolute", "elastic", "log"],
)
def test_descent_forward_and_backward(loss: Any, formula: Any, y: Any, weighted: bool) -> None:
    w = W if weighted else None
    for sizes in (LINEAR, MLP):
        weights, losses = Descent(**formula).run(drawn(models.mlp(sizes), 8), y, w)
        trainer = forward_backward(sizes, y, w, 8, learning_loss=loss)
        same(trainer.train_losses_, losses)
        same([v.numpy() for v in trainer.get_state()], weights)


@pytest.mark.parametrize("own", [False, True], ids=["together", "one by one"])
@pytest.mark.parametrize("penalty", [(0.0, 0.0), (0.003, 0.02)])
@pytest.mark.parametrize("nesterov", [None, False, True])
def test_momentum_and_penalty(nesterov: bool | None, penalty: Any, own: bool) -> None:
    momentum = None if nesterov is None else 0.8
    expected = Descent(**HALF, momentum=momentum, nesterov=bool(nesterov), shrink=penalty)
    weights, losses = expected.run(drawn(models.mlp(MLP), 9), Y, W)
    cls = LearningRateSGD if nesterov is None else LearningRateSGDNesterov
    if own:  # so that its ``update_weights`` is called, weight by weight
        cls = type("Own", (cls,), {})
    rate = cls(0.1) if nesterov is None else cls(0.1, momentum=0.8, nesterov=nesterov)
    shrinking = ElasticLearningPenalty(*penalty) if any(penalty) else None
    trainer = forward_backward(MLP, Y, W, 9, learning_rate=rate, learning_penalty=shrinking)
    same(trainer.train_losses_, losses)
    same([v.numpy() for v in trainer.get_state()], weights)
    if nesterov is not None:
        assert all(np.abs(v.numpy()).max() > 0 for v in trainer.get_state("grad"))


class Cubic(BaseLearningLoss):
    """A loss as another author would write it, without a component."""

    def build_onnx_function(self, opset: int, device: Any, *args: Any) -> None:
        """Nothing: it is numpy's."""

    def loss_gradient(self, device: Any, expected: Any, predicted: Any, weight: Any = None) -> Any:
        e = predicted.numpy() - expected.numpy()
        cost = (np.abs(e) ** 3).sum(keepdims=True)[0]
        return numpy_to_ort_value(cost), numpy_to_ort_value(3 * e * np.abs(e))


class Halving(BaseLearningRate):
    """A learning rate as another author would write it."""

    needs_grad = False  # type: ignore[assignment]
    value = 0.05  # type: ignore[assignment]

    def build_onnx_function(self, opset: int, device: Any, *args: Any) -> None:
        """Nothing to build."""

    def init_learning_rate(self) -> BaseLearningRate:
        self.rate = 0.05
        return self

    def update_learning_rate(self, t: int) -> BaseLearningRate:
        self.rate /= 2
        return self

    def update_weights(
        self, n: int, device: Any, statei: Any, gradienti: Any, size: int, velocity: Any = None
    ) -> Any:
        statei.update_inplace(statei.numpy() - self.rate / size * gradienti.numpy())
        return statei


def test_parts_of_ones_own() -> None:
    def slope(p: Any, y: Any) -> Any:
        return 3 * (p - y) * np.abs(p - y)

    formula = {"value": lambda p, y: np.abs(p - y) ** 3, "slope": slope}
    expected = Descent(**formula, rate=lambda t: 0.05 / 2**t)
    weights, losses = expected.run(drawn(models.mlp(LINEAR), 2), Y)
    trainer = forward_backward(LINEAR, Y, None, 2, learning_rate=Halving(), learning_loss=Cubic())
    same(trainer.train_losses_, losses)
    same([v.numpy() for v in trainer.get_state()], weights)


def test_the_backends_are_the_best_there_are() -> None:
    runtime = require_runtime()
    model = models.mlp(MLP)
    session = OrtGradientOptimizer(add_loss_output(model), ["W1"], max_iter=1).fit(X, Y)
    wanted = "training_session" if runtime.has_training_session else "fused"
    assert session.train_session_.name == wanted
    beside = OrtGradientForwardBackwardOptimizer(onnx_rename_weights(model), max_iter=1).fit(X, Y)
    engine = "training_agent" if runtime.has_training_agent else "fused"
    assert beside.train_function_._function.engine == engine


def test_what_the_runtime_has_wrong_the_fused_graphs_train() -> None:
    model = models.mlp(MLP, activation="Atan")  # the builders have no gradient of it
    graph, settings = add_loss_output(model), {"max_iter": 30, "learning_rate": 0.1}
    session = inside(graph, list(get_train_initializer(model)), **settings).fit(X, Y)
    beside = OrtGradientForwardBackwardOptimizer(onnx_rename_weights(model), **settings).fit(X, Y)
    assert session.train_session_.name == beside.train_function_._function.engine == "fused"
    for one in (session, beside):
        assert one.train_losses_[-1] < one.train_losses_[0]


def test_penalties_of_ones_own_are_asked_for_the_loss() -> None:
    class Constant(BaseLearningPenalty):
        def build_onnx_function(self, opset: int, device: Any, *args: Any) -> None:
            """Nothing to build."""

        def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
            return numpy_to_ort_value(loss.numpy() + 100 * SIZE)

        def update_weights(self, n: int, device: Any, statei: Any) -> Any:
            return statei

    plain = forward_backward(LINEAR, Y, None, 1)
    other = forward_backward(LINEAR, Y, None, 1, learning_penalty=Constant())
    np.testing.assert_allclose(other.train_losses_, np.add(plain.train_losses_, 100), rtol=1e-6)


# Forward and backward by hand --------------------------------------------------------------------


def test_forward_and_backward_take_anything() -> None:
    from ortflex_plugins.onnxcustom.devices import own_vector

    model = models.linear(3)
    made = OrtGradientForwardBackward(model, debug=True)
    cls = made.cls_type_
    assert cls._onx_inp == cls._grad_input_names == ["X", "coef", "intercept"]
    assert cls._onx_out == cls._bw_fetches_names == ["X_grad", "coef_grad", "intercept_grad"]
    assert (cls._input_names, cls._output_names) == (["X"], ["Y"])
    assert cls._weights_to_train == data.NAMES
    coef, intercept = (made.get_initializer(n) for n in data.NAMES)
    given = [data.X, coef, intercept]
    values = [api.numpy_to_ort_value(a) for a in given]
    seed = RNG.standard_normal((data.ROWS, 1)).astype(np.float32)
    for form in (given, values, own_vector(values)):
        instance = made.new_instance()
        expected = data.X @ coef + intercept
        for training in (False, True):
            [out] = [v.numpy() for v in instance.forward(form, training=training)]
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        found = [v.numpy() for v in instance.backward([seed])]
        for a, b in zip(found, [seed @ coef.T, data.X.T @ seed, seed.sum(0)], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    twin = pickle.loads(pickle.dumps(made))
    assert repr(twin) == "OrtGradientForwardBackward(...)"
    assert twin.new_instance().forward(given)[0].shape() == [data.ROWS, 1]


def test_several_passes_wait_and_outputs_outlive_the_way_back() -> None:
    instance = OrtGradientForwardBackward(onnx_rename_weights(models.mlp((3, 4, 1)))).new_instance()
    weights = [a for a, _ in api.get_train_initializer(models.mlp((3, 4, 1))).values()]
    ones = np.ones((data.ROWS, 1), np.float32)
    first = instance.forward([data.X, *weights], training=True)
    before = first[0].numpy().copy()
    second = instance.forward([2 * data.X, *weights], training=True)
    gradients_of_second = instance.backward([ones])[0].numpy().copy()
    gradients_of_first = instance.backward([ones])[0].numpy().copy()
    np.testing.assert_array_equal(first[0].numpy(), before)
    assert not np.allclose(second[0].numpy(), before)
    w1, b1, w2, _ = (w.astype(np.float64) for w in weights)
    for x, found in ((data.X, gradients_of_first), (2 * data.X, gradients_of_second)):
        h = np.tanh(x @ w1 + b1)
        np.testing.assert_allclose(found, (1 - h**2) * w2.T @ w1.T, rtol=1e-4, atol=1e-5)


def test_forward_and_backward_say_what_is_missing() -> None:
    instance = OrtGradientForwardBackward(models.linear(3)).new_instance()
    with pytest.raises(RuntimeError, match="there is no saved forward pass"):
        instance.backward([data.Y])
    with pytest.raises(DataError, match=r"inputs: expected 3 \(X, coef, intercept\), got 1"):
        instance.forward([data.X])
    with pytest.raises(DataError, match="inputs: 'coef' is None"):
        instance.forward([data.X, None, None])
    with pytest.raises(ConfigError, match="expected some of CPUExecutionProvider"):
        OrtGradientForwardBackward(models.linear(3), providers=["NONE"])


@pytest.mark.parametrize("training", [True, False])
def test_weights_and_gradients_have_their_shapes(training: bool) -> None:
    function = OrtGradientForwardBackward(models.linear(3)).new_instance()
    coef, intercept = np.ones((3, 1), np.float32), np.ones(1, np.float32)
    with pytest.raises(DataError, match=r"'coef' has shape \[3\], the initializer has \[3, 1\]"):
        function.forward([data.X, coef[:, 0], intercept], training)
    if training:
        function.forward([data.X, coef, intercept], True)
        with pytest.raises(DataError, match=r"'Y' has shape \[1, 1\], the output has \[33, 1\]"):
            function.backward([data.Y[:1]])


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
