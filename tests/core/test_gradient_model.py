"""The gradient of a model as a model: what goes in and out, and that it is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from ortflex_core import GraphError, ModelError, NoGradientRule, NotDifferentiable, gradient_model
from tests import models, oracles
from tests.gradcheck import data
from tests.training import plugins


def model(body: str, opset: int = 17, domains: str = "") -> ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}{domains}]> g {body}'
    )


def vjp(source: ModelProto, wrt: Any, outputs: Any = None) -> ModelProto:
    made = gradient_model(source, wrt, outputs, plugins=plugins())
    onnx.checker.check_model(made, full_check=True)
    return made


def names(made: ModelProto) -> tuple[list[str], list[str]]:
    return [i.name for i in made.graph.input], [o.name for o in made.graph.output]


def differences(source: ModelProto, feeds: Any, cotangents: Any, wrt: str) -> Any:
    """Central differences of Σ cotangent · output; the data are float64."""

    def weighted(moved: Any) -> Any:
        got = models.predict(source, feeds | {wrt: moved})
        return sum((got[n] * c).sum() for n, c in cotangents.items())

    return oracles.central_differences(weighted, feeds[wrt])


TWO = """(double[N, 3] x, double[3, 2] w, double[N, 3] aside) => (double[N, 2] y, double[N, 2] z) {
    m = MatMul(x, w)
    y = Tanh(m)
    z = Mul(m, y)
}"""


@pytest.mark.parametrize("rows", [1, 4])
def test_inputs_and_several_outputs_at_any_batch_size(rows: int) -> None:
    source = model(TWO)
    made = vjp(source, ["w", "x"])
    assert names(made) == (
        ["x", "w", "aside", "cotangent/y", "cotangent/z"],
        ["y", "z", "gradient/w", "gradient/x"],
    )
    feeds = {"x": data(rows, 3), "w": data(3, 2, seed=1), "aside": data(rows, 3)}
    cotangents = {"y": data(rows, 2, seed=2), "z": data(rows, 2, seed=3)}
    given = {f"cotangent/{n}": c for n, c in cotangents.items()}
    got = models.predict(made, feeds | given)
    for name, value in models.predict(source, feeds).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12)
    for name in ("w", "x"):
        expected = differences(source, feeds, cotangents, name)
        np.testing.assert_allclose(got[f"gradient/{name}"], expected, rtol=1e-6, atol=1e-8)


def test_only_the_outputs_that_are_named_have_cotangents() -> None:
    found = names(vjp(model(TWO), "w", "z"))
    assert found == (["x", "w", "aside", "cotangent/z"], ["y", "z", "gradient/w"])


def test_a_batch_of_any_size_is_one_size() -> None:
    made = gradient_model(models.mlp((6, 8, 1)), wrt=["X"], outputs=["Y"])
    found = [node.op_type for node in made.graph.node]
    # No sum over axes that broadcasting might have made: the shapes are known to be equal.
    assert found == ["Gemm", "Tanh", "Gemm", "Gemm", "Mul", "Sub", "Mul", "Gemm"]


def test_initializers_become_inputs_and_the_others_stay() -> None:
    source = models.mlp((6, 40, 40, 1))  # its inner weights are larger than what stays a constant
    made = vjp(source, ["W1", "X"])
    assert names(made) == (["X", "W1", "cotangent/Y"], ["Y", "gradient/W1", "gradient/X"])
    weights = models.weights_of(source)
    x, g = data(5, 6).astype("f4"), data(5, 1, seed=1).astype("f4")
    got = models.predict(made, {"X": x, "W1": weights["W1"], "cotangent/Y": g})
    hidden = [np.tanh(x @ weights["W1"] + weights["b1"])]
    hidden.append(np.tanh(hidden[0] @ weights["W2"] + weights["b2"]))
    slope = (g @ weights["W3"].T) * (1 - hidden[1] ** 2)
    slope = (slope @ weights["W2"].T) * (1 - hidden[0] ** 2)
    np.testing.assert_allclose(got["gradient/W1"], x.T @ slope, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["gradient/X"], slope @ weights["W1"].T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["Y"], models.predict(source, {"X": x})["Y"], rtol=1e-5)


def test_functions_are_inlined_and_nothing_but_standard_operators_is_left() -> None:
    text = """(double[N] x) => (double[N] y) { y = local.cube(x) }
        <domain: "local", opset_import: ["": 17]> cube (a) => (b) { s = Mul(a, a)  b = Mul(s, a) }"""
    made = vjp(model(text, domains=', "local": 1'), "x")
    assert {node.domain for node in made.graph.node} == {""}
    x = data(4)
    got = models.predict(made, {"x": x, "cotangent/y": np.ones(4)})["gradient/x"]
    np.testing.assert_allclose(got, 3 * x**2, rtol=1e-12)


def test_the_same_gradient_twice_gives_the_second_derivative() -> None:
    once = vjp(model("(double[N] x) => (double[N] y) { s = Mul(x, x)  y = Mul(s, x) }"), "x")
    renamed = models.renamed(once, {"gradient/x": "slope", "cotangent/y": "seed"})
    twice = vjp(renamed, "x", "slope")
    feeds = {"x": data(4), "seed": np.ones(4), "cotangent/slope": np.ones(4)}
    got = models.predict(twice, feeds)["gradient/x"]
    np.testing.assert_allclose(got, 6 * feeds["x"], rtol=1e-12)


@pytest.mark.parametrize(
    ("wrt", "outputs", "text"),
    [
        ("v", None, "wrt: 'v' is not an input or initializer of the model; .*Known: aside, w, x"),
        (["x", "x"], None, "wrt: 'x' is listed twice"),
        ([], None, "wrt: expected at least one name, got none"),
        ("x", "m", "outputs: 'm' is not an output of the model; Known: y, z"),
        ("x", ["y", "y"], "outputs: 'y' is listed twice"),
    ],
)
def test_names_that_do_not_fit_are_refused(wrt: Any, outputs: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        vjp(model(TWO), wrt, outputs)


def test_whole_numbers_are_refused() -> None:
    source = model("(int64[N] i, float[3] x) => (float[N] y) { y = Gather(x, i) }")
    with pytest.raises(ModelError, match="wrt: 'i' is int64, expected a float tensor"):
        vjp(source, "i")


@pytest.mark.parametrize(
    "renames",
    [
        {"m": "cotangent/y"},
        {"m": "gradient/x"},
        {"w": "gradient/x", "m": "gradient/x.1"},
        {"aside": "cotangent/y", "z": "gradient/x"},
    ],
)
def test_names_that_the_model_has_already_are_numbered(renames: dict[str, str]) -> None:
    plain, source = vjp(model(TWO), "x", "y"), models.renamed(model(TWO), renames)
    made = vjp(source, "x", "y")
    (given, taken), (inputs, outputs) = names(plain), names(made)
    assert inputs[:-1] == [renames.get(n, n) for n in given[:-1]]
    assert outputs[:-1] == [renames.get(n, n) for n in taken[:-1]]
    assert inputs[-1].startswith("cotangent/y")
    assert outputs[-1].startswith("gradient/x")
    feeds = {"x": data(4, 3), "w": data(3, 2, seed=1), "aside": data(4, 3)}
    feeds["cotangent/y"] = data(4, 2, seed=2)
    first = models.predict(plain, feeds)
    second = models.predict(made, {n: feeds[g] for n, g in zip(inputs, given, strict=True)})
    np.testing.assert_array_equal(second[outputs[-1]], first[taken[-1]])


def test_what_reaches_no_output_is_an_error() -> None:
    with pytest.raises(GraphError, match="'aside' does not reach the output"):
        vjp(model(TWO), ["x", "aside"])
    with pytest.raises(NotDifferentiable, match=r"no gradient reaches 'x' .* \(Floor\)"):
        vjp(model("(float[N] x) => (float[N] y) { y = Floor(x) }"), "x")


def test_an_operator_without_a_rule_leads_to_the_page_about_rules() -> None:
    body = "(float[N] x) => (float[N] y) { h = Exp(x) y = my.company.Silu(h) }"
    source = model(body, domains=', "my.company": 1')
    with pytest.raises(NoGradientRule) as caught:
        gradient_model(source, "x", "y", plugins=plugins())
    assert "operator Silu of my.company opset 1" in str(caught.value)
    assert "reached by x -> Exp -> Silu" in str(caught.value)
    assert "docs/howto/write-a-gradient-rule.md" in str(caught.value)
