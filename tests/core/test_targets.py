"""What the loss sees by default, and which initializers are parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    Model,
    ModelError,
    choose_parameters,
    default_output,
    file_classes,
    raw_scores,
)
from ortflex_core.compiler.parameters.selection import matching
from tests import models

helper = models.helper


def net(nodes: Any, weights: Any, output: str = "Y", features: int = 4) -> Model:
    return Model(
        models.model(
            nodes, [models.floats("X", "N", features)], [models.floats(output, "N", None)], weights
        )
    )


def trained(model: Model, params: Any = None) -> list[str]:
    return [c.name for c in choose_parameters(model, [default_output(model)], params) if c.trained]


def node(op_type: str, *names: str, **attributes: Any) -> Any:
    return helper.make_node(op_type, list(names[:-1]), [names[-1]], **attributes)


def test_matrices_and_biases_are_parameters_and_constants_are_not() -> None:
    model = net(
        [
            node("Sub", "X", "mean", "centered"),
            node("Div", "centered", "spread", "scaled"),
            node("MatMul", "scaled", "W", "z"),
            node("Add", "z", "b", "zb"),
            node("Mul", "zb", "half", "h"),
            node("Clip", "h", "low", "high", "c"),
            node("Reshape", "c", "shape", "Y"),
        ],
        {
            "mean": np.ones(4),
            "spread": np.ones(4),
            "W": np.ones((4, 3)),
            "b": np.ones(3),
            "half": np.float64(0.5),
            "low": np.float32(-1),
            "high": np.float32(1),
            "shape": np.array([-1, 3]),
        },
    )
    assert trained(model) == ["W", "b"]
    reasons = {c.name: c.reason for c in choose_parameters(model, ["Y"], None)}
    assert reasons["mean"].startswith("a constant of Sub")
    assert reasons["half"].startswith("a single number in Mul")


def test_a_weight_is_followed_through_reshapes_and_a_shared_one_is_one() -> None:
    model = net(
        [
            node("Transpose", "W", "Wt", perm=[1, 0]),
            node("MatMul", "X", "Wt", "z"),
            node("MatMul", "z", "W", "Y"),
        ],
        {"W": np.ones((3, 4))},
    )
    assert trained(model) == ["W"]


def test_what_constants_alone_are_computed_from_is_left_out() -> None:
    """As in the formulas of scikit-learn's estimators: here a scale is the difference of two constants."""
    nodes = [
        node("MatMul", "X", "W", "z"),
        node("Sub", "high", "low", "range"),
        node("MatMul", "z", "range", "Y"),
    ]
    ends = np.linspace(0, 1, 6).reshape(3, 2)
    model = net(nodes, {"W": np.ones((4, 3)), "high": ends + 0.3, "low": ends**2})
    assert trained(model) == ["W"]
    reasons = {c.name: c.reason for c in choose_parameters(model, ["Y"], None)}
    assert "arithmetic of constants alone" in reasons["high"]


def test_a_bias_of_one_channel_is_a_parameter_and_a_lone_number_is_not() -> None:
    nodes = [node("MatMul", "X", "W", "z"), node("Add", "z", "b", "a"), node("Add", "a", "c", "Y")]
    weights = {"W": np.ones((4, 1)), "b": np.ones(1), "c": np.float64(3)}
    assert trained(net(nodes, weights)) == ["W", "b"]


def test_an_attention_mask_is_no_parameter() -> None:
    nodes = [node("MatMul", "X", "W", "z"), node("Add", "z", "mask", "Y")]
    weights = {"W": np.ones((4, 3)), "mask": np.array([0, -1e9, -1e9])}
    assert trained(net(nodes, weights)) == ["W"]


def test_a_parameter_without_elements_is_none() -> None:
    nodes = [node("MatMul", "X", "W", "z"), node("MatMul", "X", "E", "e")]
    nodes.append(node("Concat", "z", "e", "Y", axis=1))
    model = net(nodes, {"W": np.ones((4, 3)), "E": np.ones((4, 0))})
    assert trained(model) == ["W"]
    assert [c.name for c in choose_parameters(model, ["Y"], ["*"]) if c.trained] == ["W"]
    with pytest.raises(ModelError, match=r"parameter 'E' has no elements, its shape is \[4, 0\]"):
        choose_parameters(model, ["Y"], ["W", "E"])


def test_only_what_reaches_the_loss_is_trained() -> None:
    model = Model(models.two_headed())
    assert [c.name for c in choose_parameters(model, ["amount"], None)] == ["shared", "to_amount"]
    with pytest.raises(
        ModelError, match="'to_scores' does not reach the tensors that the losses read"
    ):
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
    nodes = [node("MatMul", "X", "W", "z"), node("Mul", "z", "half", "Y")]
    model = net(nodes, {"W": np.ones((4, 3)), "half": np.float64(0.5)})
    assert trained(model, ["half"]) == ["half"]
    both = [*nodes, node("Reshape", "Y", "ints", "R")]
    weights = {"W": np.ones((4, 3)), "half": np.float64(0.5), "ints": np.array([-1, 3])}
    reshaped = net(both, weights, "R")
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
    two = net(
        [
            node("MatMul", "X", "W", "s"),
            node("Sigmoid", "s", "p"),
            node("Sub", "unity", "p", "q"),
            node("Concat", "q", "p", "both", axis=1),
            node("Identity", "both", "Y"),
        ],
        {"W": np.ones((4, 1)), "unity": np.float64(1)},
    )
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
    model = net(
        [node("MatMul", "X", "W", "z"), node("Add", "z", "b", "h"), node("PRelu", "h", "s", "Y")],
        {"W": np.ones((1, 1)), "b": np.ones(1), "s": np.full(1, 0.25)},
        features=1,
    )
    assert trained(model) == ["W", "b", "s"]
