"""The parts of the older API: losses, penalties, rates, bindings, batches, graphs with losses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest

from ortflex_plugins.onnxcustom import (
    AbsoluteLearningLoss,
    BaseLearningLoss,
    BaseLearningOnnx,
    BaseLearningPenalty,
    BaseLearningRate,
    ElasticLearningLoss,
    ElasticLearningPenalty,
    LearningRateSGD,
    LearningRateSGDNesterov,
    NegLogLearningLoss,
    NoLearningPenalty,
    SquareLearningLoss,
    numpy_to_ort_value,
)
from ortflex_plugins.onnxcustom.devices import borrowed

RNG = np.random.default_rng(11)
ROWS = 7
P = RNG.standard_normal((ROWS, 1)).astype(np.float32)
Y = RNG.standard_normal((ROWS, 1)).astype(np.float32)
CLASSES = RNG.integers(0, 2, (ROWS, 1))
W = RNG.uniform(0.5, 2, ROWS).astype(np.float32)


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
    y = CLASSES if name == "log" else Y
    expected, predicted, weight = map(numpy_to_ort_value, (y, P, W))
    w = W[:, None].astype(np.float64) if weighted else np.ones((ROWS, 1))
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
    for given, weight in (((W,), W), ((), 1.0)):
        total, _ = built("weight").loss_gradient("cpu", Y, P, *given)
        wanted = (weight * (P - Y)[:, 0] ** 2).sum() / 2
        assert total.numpy()[0] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(RuntimeError, match="call build_onnx_function first"):
        SquareLearningLoss().loss_gradient("cpu", Y, P)
    with pytest.raises(ValueError, match=r"build_onnx_function\(opset, device, 'weight'\)"):
        built(None).loss_gradient("cpu", Y, P, W)


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
