"""The reverse walk: what is summed, visited and refused; the rules are tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    GraphError,
    Host,
    NoGradientRule,
    NotDifferentiable,
    PluginError,
    Tensor,
    Trace,
    build,
    gradients,
)
from ortflex_core.compiler.operators.reverse_mode import Rules, RuleTable, gradients_of_some
from ortflex_core.compiler.programs.rebuild import optimize
from tests.core.test_program import conditional
from tests.gradcheck import FAMILIES, RULES, check, computed, data, run


def traced(names: Iterable[str], dtype: Any, shape: Any, mystery: int | None = None) -> Any:
    """A trace and inputs of it; ``mystery`` is the opset of a domain of others."""
    trace = Trace({"": 17} if mystery is None else {"": 17, "com.example": mystery})
    return trace, *(trace.input(name, dtype, shape) for name in names)


def value_of(trace: Trace, tensors: dict[str, Tensor], **arrays: Any) -> dict[str, Any]:
    return run(build(trace, tensors, name="p"), arrays)


def test_several_uses_are_summed() -> None:
    x = {"x": data(2, 3)}
    check(lambda op, x: op.Exp(x) * x + op.Sin(x) / (2 + op.Abs(x)) - x, x, opset=17)


def test_a_product_with_itself_is_one_contribution() -> None:
    trace, x = traced("x", np.float32, (3,))
    seed = trace.input("seed", np.float32, (3,))
    (slope,) = gradients([(x * x, seed)], [x], RULES)
    program = build(trace, {"slope": slope}, name="p")
    assert [n.op_type for n in program.proto().graph.node] == ["Mul", "Mul"]


@pytest.mark.parametrize("known", ["sizes", "names", "ranks", "nothing"])
@pytest.mark.parametrize("shape", [(2, 3), (3,), (1, 3), (2, 1), (1, 1), (1,), ()])
def test_broadcasting_is_undone(shape: tuple[int, ...], known: Any) -> None:
    arrays = {"x": data(2, 3), "b": data(*shape, seed=1)}
    check(lambda op, x, b: (x + b) * b, arrays, opset=17, known=known)


@pytest.mark.parametrize("rows", [1, 4])
def test_one_graph_serves_every_batch(rows: int) -> None:
    """A symbolic batch may be of size 1 without being taken for a broadcast."""
    trace, x = traced("x", np.float64, ("N", 3))
    w = trace.input("w", np.float64, (1, 3))
    loss = trace.op.ReduceSum(trace.op.Tanh(x * w), keepdims=0)
    dx, dw = gradients([(loss, None)], [x, w], RULES)
    arrays = {"x": data(rows, 3), "w": data(1, 3, seed=1)}
    slope = 1 - np.tanh(arrays["x"] * arrays["w"]) ** 2
    got = value_of(trace, {"dx": dx, "dw": dw}, **arrays)
    np.testing.assert_allclose(got["dx"], slope * arrays["w"], rtol=1e-12)
    np.testing.assert_allclose(got["dw"], (slope * arrays["x"]).sum(0, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize("sizes", [(4, 4), (1, 4), (4, 1), (1, 1)])
def test_two_symbols_may_or_may_not_be_equal(sizes: tuple[int, int]) -> None:
    trace = Trace({"": 17})
    x, y = (trace.input(n, np.float64, (n.upper(),)) for n in "xy")
    dx, dy = gradients([(x * y, None)], [x, y], RULES)
    a, b = (data(n, seed=k) for k, n in enumerate(sizes))
    got = value_of(trace, {"dx": dx, "dy": dy}, x=a, y=b)
    whole = np.broadcast_shapes(a.shape, b.shape)
    for mine, other, name in ((a, b, "dx"), (b, a, "dy")):
        each = np.broadcast_to(other, whole)
        expected = each.sum(keepdims=True) if mine.size < each.size else each
        np.testing.assert_allclose(got[name], expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 1), (2, 1), (1, 3), (2, 3)])
def test_seeds_may_be_smaller_than_the_root(shape: tuple[int, ...]) -> None:
    arrays = {"x": data(2, 3), "b": data(3, seed=1)}
    seed = data(*shape, seed=2)
    got = computed(lambda op, x, b: op.Exp(x) + b, arrays, seed, opset=17)
    whole = np.broadcast_to(seed, (2, 3))
    np.testing.assert_allclose(got["x"], whole * np.exp(arrays["x"]), rtol=1e-12)
    np.testing.assert_allclose(got["b"], whole.sum(0), rtol=1e-12)


def test_several_roots_add_up_and_one_may_be_the_parameter_itself() -> None:
    trace, x = traced("x", np.float64, (3,))
    seed = trace.constant(np.array([1.0, 2.0, 3.0]))
    roots = [(trace.op.Exp(x), None), (x, seed), (trace.op.Exp(x), seed)]
    (slope,) = gradients(roots, [x], RULES)
    values = data(3)
    got = value_of(trace, {"slope": slope}, x=values)["slope"]
    np.testing.assert_allclose(got, (1 + np.arange(1, 4)) * np.exp(values) + np.arange(1, 4))


def test_an_inner_tensor_can_be_differentiated_by_together_with_its_inputs() -> None:
    trace, x = traced("x", np.float64, (3,))
    y = trace.op.Exp(x)
    dy, dx = gradients([(y * y * y, None)], [y, x], RULES)
    values = data(3)
    got = value_of(trace, {"dy": dy, "dx": dx}, x=values)
    np.testing.assert_allclose(got["dy"], 3 * np.exp(2 * values))
    np.testing.assert_allclose(got["dx"], 3 * np.exp(3 * values))


def test_gradients_can_be_differentiated_again() -> None:
    trace, x = traced("x", np.float64, (4,))
    (once,) = gradients([(trace.op.Sin(x) * x, None)], [x], RULES)
    (twice,) = gradients([(once, None)], [x], RULES)
    values = data(4)
    got = value_of(trace, {"twice": twice}, x=values)["twice"]
    np.testing.assert_allclose(got, 2 * np.cos(values) - values * np.sin(values), rtol=1e-12)


def test_host_scalars_pass_through_as_factors() -> None:
    trace, x = traced("x", np.float32, (3,))
    rate = Host.symbol("rate")
    (slope,) = gradients([(rate * (x * x), None)], [x], RULES)
    program = build(trace, {"slope": slope}, name="p")
    assert program.nodes == 1  # (2 rate) x
    assert [h.expression.symbols for h in program.hosts] == [{"rate"}]


def test_only_what_lies_between_is_visited() -> None:
    trace, x, other = traced(("x", "other"), np.float32, (3,))
    aside = trace.op.Sign(other)
    before = len(trace.nodes)
    (slope,) = gradients([(x * aside, None)], [x], RULES)
    assert slope is aside
    assert len(trace.nodes) == before + 1  # the product itself came before; nothing for Sign


def unknown(trace: Trace, x: Tensor, name: str = "") -> Tensor:
    kind = [(x.dtype, x.shape)]
    return trace.node("Mystery", [x], {}, domain="com.example", name=name, types=kind)[0]


def test_the_error_about_a_missing_rule_has_the_path_and_what_to_do() -> None:
    trace, w = traced(["dense/W"], np.float32, (3,), mystery=3)
    y = unknown(trace, trace.op.Exp(w), name="block3")
    with pytest.raises(NoGradientRule) as caught:
        gradients([(trace.op.ReduceSum(y), None)], [w], RULES)
    text = str(caught.value)
    assert "operator Mystery of com.example opset 3, node 'block3' (Mystery)" in text
    assert "reached by dense/W -> Exp -> 'block3' (Mystery)" in text
    assert "Freeze the parameters before it (params=['*', '!name'])" in text
    assert "entry point of 'ortflex.gradients'" in text


def test_an_unknown_operator_aside_does_no_harm() -> None:
    trace, w, x = traced("wx", np.float32, (3,), mystery=1)
    gradients([(w * unknown(trace, x), None)], [w], RULES)


def test_rules_of_plugins_are_added_to_the_built_in_rules() -> None:
    trace, w = traced(["w"], np.float32, (3,), mystery=1)
    mine = Rules()
    mine.rule("Mystery", domain="com.example")(lambda op, node, g: [3 * g])
    (slope,) = gradients([(unknown(trace, w), None)], [w], RuleTable({**FAMILIES, "mine": mine}))
    got = value_of(trace, {"slope": slope}, w=np.zeros(3, np.float32))["slope"]
    np.testing.assert_array_equal(got, np.full(3, 3.0))


@pytest.mark.parametrize(
    ("formula", "named"),
    [
        (lambda op, w: op.Floor(op.Exp(w)) + op.Cast(op.ArgMax(w, axis=1), to=1), ".*Floor.*"),
        (lambda op, w: op.Floor(w) * op.Floor(w), "Floor"),
    ],
)
def test_operators_that_stop_the_gradient_on_every_path_are_named(formula: Any, named: str) -> None:
    trace, w = traced("w", np.float32, (3, 2))
    text = rf"no gradient reaches 'w' \[3, 2\]: .* without a gradient \({named}\)$"
    with pytest.raises(NotDifferentiable, match=text):
        gradients([(formula(trace.op, w), None)], [w], RULES)


def test_a_path_without_gradient_leaves_the_other_paths() -> None:
    x = data(3, low=0.2, high=0.8)
    got = computed(lambda op, x: op.Floor(x) + 2 * x, {"x": x}, None, opset=17)
    np.testing.assert_array_equal(got["x"], [2, 2, 2])


def test_a_parameter_that_leads_nowhere_is_an_error() -> None:
    _, w, v = traced("wv", np.float32, (3,))
    with pytest.raises(GraphError, match="'v' does not reach the output, so it has no gradient"):
        gradients([(w * 2, None)], [w, v], RULES)
    with pytest.raises(GraphError, match="at least one root"):
        gradients([], [w], RULES)


@pytest.mark.parametrize("taken", [True, False])
def test_a_parameter_read_by_a_subgraph_is_not_overlooked(taken: bool) -> None:
    trace = Trace({"": 17})
    flag = trace.input("flag", np.bool_, ())
    w = trace.input("w", np.float32, ("N", 3))
    y = conditional(trace, flag, 2 * w, "captured") + w
    (slope,) = gradients([(y, None)], [w], RULES)
    given = {"flag": np.array(taken), "w": np.ones((2, 3), np.float32)}
    got = value_of(trace, {"slope": slope}, **given)
    np.testing.assert_array_equal(got["slope"], np.full((2, 3), 3.0))


def family(op_type: str, factor: float, since: int = 1) -> Rules:
    rules = Rules()
    rules.rule(op_type, since=since)(lambda op, node, g: [factor * g])
    return rules


def test_two_families_with_one_operator_are_refused_until_ordered() -> None:
    families = {"ours": family("Neg", -1), "theirs": family("Neg", 7)}
    with pytest.raises(PluginError) as caught:
        RuleTable(families).lookup("", "Neg", 17)
    assert str(caught.value) == (
        "two gradient rules for Neg: from the families 'ours' and 'theirs'; "
        "order them with gradients=['theirs'] or ['ours']"
    )
    for first, expected in (("ours", -1), ("theirs", 7)):
        rules = RuleTable(families, first=[first])
        got = computed(lambda op, x: op.Neg(x), {"x": data(2)}, None, opset=17, rules=rules)
        np.testing.assert_array_equal(got["x"], [expected] * 2)


def test_an_unknown_family_is_answered_with_the_nearest() -> None:
    with pytest.raises(PluginError, match="no family of gradient rules 'our'; did you mean 'ours'"):
        RuleTable({"ours": family("Neg", -1)}, first=["our"])


def test_a_rule_with_since_is_used_from_that_opset_on() -> None:
    rules = family("Neg", 1, since=13)
    rules.rule("Neg", since=16)(lambda op, node, g: [5 * g])
    table = RuleTable({"mine": rules})
    for opset, expected in ((13, 1), (15, 1), (16, 5), (17, 5)):
        got = computed(lambda op, x: op.Neg(x), {"x": data(1)}, None, opset=opset, rules=table)
        assert got["x"] == [expected]
    assert table.lookup("", "Neg", 12) == (False, None)
    with pytest.raises(PluginError, match="two gradient rules for Neg since opset 16"):
        rules.rule("Neg", since=16)(lambda op, node, g: [g])


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda op, node, g: [g], "rule for Add returns 1 gradients for 2 inputs"),
        (
            lambda op, node, g: [op.Cast(g, to=1), g],
            "rule for Add returns a gradient of type float32 for input 0, but the input is float64",
        ),
    ],
)
def test_a_rule_that_answers_wrongly_is_named(rule: Any, reason: str) -> None:
    rules = Rules()
    rules.rule("Add")(rule)
    table, arrays = RuleTable({"mine": rules}), {"x": data(2), "y": data(2)}
    with pytest.raises(PluginError, match=reason):
        computed(lambda op, x, y: x + y, arrays, None, opset=17, rules=table)


def test_gradients_that_nothing_needs_are_not_computed() -> None:
    made = []
    rules = Rules()

    @rules.rule("Mul")
    def mul(op: Any, node: Any, g: Any) -> Any:
        assert (node.op_type, node.needs(0), node.needs(1)) == ("Mul", False, True)
        return [lambda: made.append(0), lambda: g * node.inputs[0]]

    _, x, w = traced("xw", np.float32, (3,))
    gradients([(x * w, None)], [w], RuleTable({"mine": rules}))
    assert made == []


def test_a_rule_sees_attributes_with_their_defaults() -> None:
    seen = {}
    rules = Rules()

    @rules.rule("Gemm")
    def gemm(op: Any, node: Any, g: Any) -> Any:
        seen.update(a=node.alpha, b=node.transB, c=node.input(2), d=node.no_such_attribute)
        return [g, None]

    trace, x = traced("x", np.float32, (3, 3))
    gradients([(trace.op.Gemm(x, x, transB=1), None)], [x], RuleTable({"mine": rules}))
    assert seen == {"a": 1.0, "b": 1, "c": None, "d": None}


def test_a_stopped_gradient_is_a_constant_and_costs_no_node() -> None:
    """d/dx x·stop(x²) = x²; what depends on a stopped value alone has no gradient."""
    trace, x, z = traced("xz", np.float64, (3,))
    op = trace.op
    y = x * op.stop_gradient(x * x) + op.stop_gradient(z)
    assert op.stop_gradient(z) is op.stop_gradient(z)
    assert gradients_of_some([(y, None)], [x, z], RULES)[0][0] is x
    (slope,) = gradients([(y, None)], [x], RULES)
    with pytest.raises(GraphError, match="'z'"):
        gradients([(y, None)], [x, z], RULES)
    with pytest.raises(GraphError, match="'z'"):
        gradients_of_some([(y, None)], [z], RULES)
    trace, outputs = optimize(trace, {"y": y, "slope": slope})
    program = build(trace, outputs, name="p")
    assert "Identity" not in {n.op_type for n in program.proto().graph.node}
    feeds = {"x": np.array([1.0, -2, 3]), "z": np.zeros(3)}
    np.testing.assert_allclose(run(program, feeds)["slope"], feeds["x"] ** 2)
