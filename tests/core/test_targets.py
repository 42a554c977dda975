"""What the loss sees by default, and which initializers are parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    FLOATS,
    Model,
    ModelError,
    choose_parameters,
    default_output,
    file_classes,
    raw_scores,
)
from ortflex_core.compiler.problem.parameters import matching
from tests import models, parameter_files


def net(body: str, output: str = "Y", features: int = 4, **weights: Any) -> Model:
    values = f"float[N, {features}] X", f"float[N, ?] {output}"
    return Model(models.parsed(body, weights, *values))


def trained(model: Model, params: Any = None) -> list[str]:
    return [c.name for c in choose_parameters(model, [default_output(model)], params) if c.trained]


W, LAYER = np.ones((4, 3)), "z = MatMul(X, W)"


def test_matrices_and_biases_are_parameters_and_constants_are_not() -> None:
    body = """
        centered = Sub(X, mean)  scaled = Div(centered, spread)  z = MatMul(scaled, W)
        zb = Add(z, b)  h = Mul(zb, half)  c = Clip(h, low, high)  Y = Reshape(c, shape)
    """
    numbers = {"half": np.float64(0.5), "low": np.float32(-1), "high": np.float32(1)}
    arrays = {"mean": np.ones(4), "spread": np.ones(4), "W": W, "b": np.ones(3)}
    model = net(body, **arrays, **numbers, shape=np.array([-1, 3]))
    assert trained(model) == ["W", "b"]
    reasons = {c.name: c.reason for c in choose_parameters(model, ["Y"], None)}
    assert reasons["mean"].startswith("a constant of Sub")
    assert reasons["half"].startswith("a single number in Mul")


def test_a_weight_is_followed_through_reshapes_and_a_shared_one_is_one() -> None:
    body = "Wt = Transpose <perm = [1, 0]> (W)  z = MatMul(X, Wt)  Y = MatMul(z, W)"
    assert trained(net(body, W=W.T)) == ["W"]


def test_what_constants_alone_are_computed_from_is_left_out() -> None:
    """As in the formulas of scikit-learn's estimators: here a scale is the difference of two constants."""
    ends = np.linspace(0, 1, 6).reshape(3, 2)
    body = f"{LAYER}  range = Sub(high, low)  Y = MatMul(z, range)"
    model = net(body, W=W, high=ends + 0.3, low=ends**2)
    assert trained(model) == ["W"]
    reasons = {c.name: c.reason for c in choose_parameters(model, ["Y"], None)}
    assert "arithmetic of constants alone" in reasons["high"]


def test_a_bias_of_one_channel_is_a_parameter_and_a_lone_number_is_not() -> None:
    numbers = {"W": np.ones((4, 1)), "b": np.ones(1), "c": np.float64(3)}
    assert trained(net(f"{LAYER}  a = Add(z, b)  Y = Add(a, c)", **numbers)) == ["W", "b"]


def test_an_attention_mask_is_no_parameter() -> None:
    mask = np.array([0, -1e9, -1e9])
    assert trained(net(f"{LAYER}  Y = Add(z, mask)", W=W, mask=mask)) == ["W"]


def test_a_parameter_without_elements_is_none() -> None:
    body = f"{LAYER}  e = MatMul(X, E)  Y = Concat <axis = 1> (z, e)"
    model = net(body, W=W, E=np.ones((4, 0)))
    assert trained(model) == ["W"]
    assert [c.name for c in choose_parameters(model, ["Y"], ["*"]) if c.trained] == ["W"]
    with pytest.raises(ModelError, match=r"parameter 'E' has no elements, its shape is \[4, 0\]"):
        choose_parameters(model, ["Y"], ["W", "E"])


def test_only_what_reaches_the_loss_is_trained() -> None:
    model = Model(models.two_headed())
    assert [c.name for c in choose_parameters(model, ["amount"], None)] == ["shared", "to_amount"]
    with pytest.raises(ModelError, match="'to_scores' does not reach the tensors that the losses"):
        choose_parameters(model, ["amount"], ["to_scores"])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, ["W1", "b1", "W2", "b2", "W3", "b3"]),
        ("W*", ["W1", "W2", "W3"]),
        (["W*", "!W2"], ["W1", "W3"]),
        (["!b*"], ["W1", "W2", "W3"]),
        (["W1", "b3"], ["W1", "b3"]),
        (["*", "!*1"], ["W2", "b2", "W3", "b3"]),
    ],
)
def test_names_and_globs_choose(params: Any, expected: list[str]) -> None:
    assert trained(Model(models.mlp()), params) == expected


def test_a_constant_is_trained_if_it_is_named() -> None:
    body, weights = f"{LAYER}  Y = Mul(z, half)", {"W": W, "half": np.float64(0.5)}
    assert trained(net(body, **weights), ["half"]) == ["half"]
    reshaped = net(f"{body}  R = Reshape(Y, ints)", "R", **weights, ints=np.array([-1, 3]))
    with pytest.raises(ModelError, match=r"the parameter 'ints' is int64.*only float"):
        trained(reshaped, ["ints"])


def test_a_full_name_wins_over_a_glob_and_an_earlier_glob_over_a_later() -> None:
    names = ["W1", "W2", "b1"]
    table = {"W*": "first", "*1": "second", "W2": "own"}
    assert matching(table, names, "penalty") == {"W2": "W2", "W1": "W*", "b1": "*1"}
    with pytest.raises(ModelError, match="penalty: no trained parameter matches 'V'"):
        matching({"V": 0}, names, "penalty")


def test_scores_are_found_behind_softmax_sigmoid_and_two_columns() -> None:
    assert raw_scores(Model(models.classifier()), "probabilities") == ("scores", "Softmax")
    assert raw_scores(Model(models.linear()), "Y") == ("Y", None)
    body = """
        s = MatMul(X, W)  p = Sigmoid(s)  q = Sub(unity, p)
        both = Concat <axis = 1> (q, p)  Y = Identity(both)
    """
    two = net(body, W=np.ones((4, 1)), unity=np.float64(1))
    assert raw_scores(two, "Y") == ("s", "Sigmoid")
    assert trained(two) == ["W"]


@pytest.mark.parametrize("labels", [["no", "maybe", "yes"], [3, 7, 9]])
def test_class_labels_are_read_from_the_file(labels: Any) -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    network = pytest.importorskip("sklearn.neural_network")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 4)).astype(np.float32)
    y = np.array(labels)[np.arange(30) % 3]
    fitted = network.MLPClassifier((3,), max_iter=1)
    with pytest.warns(match="Maximum iterations"):
        fitted.fit(x, y)
    for zipmap in (True, False):
        proto = skl2onnx.to_onnx(fitted, x[:1], options={"zipmap": zipmap}, target_opset=17)
        found = file_classes(Model(proto))
        assert found is not None
        np.testing.assert_array_equal(found.astype(fitted.classes_.dtype), fitted.classes_)
    assert file_classes(Model(models.classifier())) is None


def test_single_numbers_in_the_place_of_weights_are_weights() -> None:
    numbers = {"W": np.ones((1, 1)), "b": np.ones(1), "s": np.full(1, 0.25)}
    model = net(f"{LAYER}  h = Add(z, b)  Y = PRelu(h, s)", features=1, **numbers)
    assert trained(model) == ["W", "b", "s"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", parameter_files.names())
def test_what_torch_trains_is_trained(name: str) -> None:
    proto, weights = parameter_files.stored(name)
    model = Model(proto)
    outputs = [o.name for o in model.outputs if o.dtype in FLOATS]
    used = {i for node in model.ancestors(outputs) for i in node.input}
    expected = {n for n, is_weight in weights.items() if is_weight and n in used}
    choices = choose_parameters(model, outputs, None)
    reasons = {c.name: c.reason for c in choices}
    chosen = {c.name for c in choices if c.trained}
    assert chosen == expected, {n: reasons.get(n) for n in chosen ^ expected}
    assert all(reasons.values()), "every choice has a reason"


@pytest.mark.sampled
def test_the_collection_is_of_some_size() -> None:
    """A sample of each package and of both exporters."""
    names = parameter_files.names()
    assert len(names) >= 50
    for part in ("transformers.", "timm.", ".script-train", ".script-eval", ".dynamo-train"):
        assert any(part in name for name in names)
