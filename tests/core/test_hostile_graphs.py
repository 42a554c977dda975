"""Graphs from strangers: very large, very deep, malformed, as mutants showed them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex_core import DataError, GraphError, Model, ModelError, OrtflexError, Trace, gradients
from ortflex_core.compiler.graph.constant_folding import fold
from ortflex_core.compiler.onnx_files.vetting import MOST_ADDED
from ortflex_core.compiler.operators.reverse_mode import Rules, RuleTable
from tests import models
from tests.training import make, regression

node = helper.make_node


@pytest.mark.parametrize("nodes", [100_001, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_very_many_nodes_are_refused_at_once(nodes: int) -> None:
    model = models.linear()
    model.graph.node.extend([node("Relu", ["XW"], ["r"])] * nodes)
    with pytest.raises(ModelError, match=r"more than (the )?100000"):
        Model(model.SerializeToString())


def calling(levels: int, calls: int, last: str = "Tanh") -> ModelProto:
    """Functions that each call the next one several times."""
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "f": 1]> '
        "g (float[N, 1] x) => (float[N, 1] y) <float[1, 1] w = {2}> { m = MatMul(x, w) y = f.f0(m) }"
    )
    for k in range(levels):
        inner = f"f{k + 1}" if k < levels - 1 else last
        domain = "f" if k < levels - 1 or last != "Tanh" else ""
        names = ["a", *(f"v{c}" for c in range(calls))]
        nodes = [node(inner, [a], [b], domain=domain) for a, b in pairwise(names)]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
        made.functions.append(helper.make_function("f", f"f{k}", ["a"], [names[-1]], nodes, opsets))
    return made


def test_functions_that_multiply_are_counted_before_they_are_written_out() -> None:
    """However many there would be, and where 2 KB would be 65,536 nodes."""
    with pytest.raises(ModelError, match=f"with its functions inlined, has {1 + 10**9} nodes"):
        Model(calling(levels=9, calls=10))
    text = f"has 65537 nodes; for a file of 34 nodes, at most {34 + MOST_ADDED}"
    with pytest.raises(ModelError, match=text):
        Model(calling(levels=16, calls=2))
    assert len(Model(calling(levels=3, calls=3)).internal.graph.node) >= 27


def test_functions_that_call_themselves_or_very_deep() -> None:
    with pytest.raises(ModelError, match="the function 'f0' calls itself"):
        Model(calling(levels=3, calls=1, last="f0"))
    with pytest.raises(ModelError, match="functions call each other 33 levels deep"):
        Model(calling(levels=100, calls=1))


def nested(levels: int) -> ModelProto:
    """An If in an If in an If, whose conditions are known only when it runs."""
    inner = [node("Tanh", ["m"], ["out"])]
    for _ in range(levels):
        branch = helper.make_graph(inner, "b", [], [models.floats("out", None, 1)])
        inner = [node("If", ["yes"], ["out"], then_branch=branch, else_branch=branch)]
    inner[0].output[0] = "Y"
    body = "m = MatMul(X, coef)  top = ReduceMax<keepdims = 0>(m)  yes = Less(top, bound)"
    weights = {"coef": np.ones((5, 1)), "bound": np.float32(100)}
    model = models.parsed(body, weights, "float[N, 5] X", "float[N, 1] Y")
    model.graph.node.extend(inner)
    return model


def test_subgraphs_too_deep_are_refused() -> None:
    with pytest.raises(ModelError, match="subgraphs are more than 8 levels deep"):
        Model(nested(9))
    make(nested(3), backend="fused", epochs=1).fit(*regression(rows=8))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.graph.sparse_initializer.add(), "has sparse initializers"),
        (
            lambda m: m.graph.node[0].attribute.add(name="alpha", ref_attr_name="c", type=1),
            "refers to an attribute of a function, but is not in a function",
        ),
        (lambda m: m.graph.initializer[0].segment.SetInParent(), "is a segment of a tensor"),
    ],
)
def test_what_is_refused_by_its_kind(change: Callable[[ModelProto], Any], text: str) -> None:
    model = models.linear()
    change(model)
    with pytest.raises(ModelError, match=text):
        Model(model)


BAD = b"\xff\xfe\xfd\xfc"


def _texts() -> ModelProto:
    """A model with a text, ``text``, in every place that has one."""
    inner = onnx.parser.parse_graph("text () => (float[N, 5] b) { b = Neg(X) }")
    other = onnx.parser.parse_graph("inner () => (float[text, 5] c) { c = Neg(X) }")
    proto = models.model(
        [
            node("If", ["on"], ["h"], then_branch=inner, else_branch=other),
            helper.make_node("Twice", ["h"], ["t"], domain="mine"),
            node("MatMul", ["t", "coef"], ["Y"], "text"),
        ],
        [models.floats("X", "N", 5)],
        [models.floats("Y", "text", 1)],
        {"coef": np.ones((5, 1)), "on": np.array(True)},
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("text", 1)]
    body = [helper.make_node("Add", ["text", "text"], ["out"])]
    proto.functions.append(helper.make_function("mine", "Twice", ["text"], ["out"], body, opsets))
    proto.opset_import.extend([helper.make_opsetid("mine", 1), helper.make_opsetid("text", 1)])
    helper.set_model_props(proto, {"text": "text"})
    proto.graph.name = "text"
    return proto


def test_no_text_of_any_place_is_not_utf_8() -> None:
    source = _texts().SerializeToString()
    Model(source)
    places = [k for k in range(len(source)) if source[k : k + 4] == b"text"]
    assert len(places) == 12
    for k in places:
        with pytest.raises(ModelError, match="is not UTF-8"):
            Model(source[:k] + BAD + source[k + 4 :])


def test_inputs_of_old_models_are_made_up_within_bounds() -> None:
    """They are run once when they are raised; each of these would be let through alone."""
    body, large = "m = Mul(X, coef)  n = Add(m, A)  Y = Add(n, B)", f"float[{2**13}, {2**13 - 1}]"
    inputs = ", ".join(f"{large} {name}" for name in "XAB")
    proto = models.parsed(body, {"coef": np.ones((1, 1))}, inputs, f"{large} Y", opset=11)
    with pytest.raises(ModelError, match="test values cannot be made for the input A"):
        Model(proto)


# What was found by mutants ------------------------------------------------------------------------


def dropping(ratio: Any) -> ModelProto:
    weights = {
        "coef": np.ones((5, 1)),
        "ratio": np.asarray(ratio, np.float32),
        "on": np.array(True),
    }
    body = "m = MatMul(X, coef)  Y = Dropout(m, ratio, on)"
    model = models.parsed(body, weights, "float[N, 5] X", "float[N, 1] Y")
    model.graph.node[1].name = "drop"
    return model


@pytest.mark.parametrize("ratio", [1.0, [0.5, 0.5], []])
def test_a_dropout_that_is_none_names_the_node(ratio: Any) -> None:
    with pytest.raises(OrtflexError, match=r"Dropout.*drop"):
        make(dropping(ratio), backend="fused").fit(*regression(rows=8))


def test_a_node_that_is_not_what_its_operator_asks_for_is_named() -> None:
    body = """h = MatMul(x, w)  parts = SplitToSequence <axis = 7> (h)
        zero = Constant <value = int64 {0}> ()  y = SequenceAt(parts, zero)"""
    model = models.parsed(body, {"w": np.eye(3)}, "float[N, 3] x", "float[N, 3] y")
    model.graph.node[1].name = "cut"
    x = np.ones((4, 3), np.float32)
    with pytest.raises(OrtflexError, match=r"SplitToSequence 'cut' does not fit|axis"):
        make(model, backend="fused").fit(x, x)


@pytest.mark.parametrize("opset", [17, 11])
def test_shapes_that_do_not_fit_never_reach_the_runtime(opset: int) -> None:
    """onnxruntime 1.19 ends the process over a convolution of a matrix."""
    model = models.conv_net()
    del model.graph.input[0].type.tensor_type.shape.dim[2:]
    model.opset_import[0].version = opset
    with pytest.raises(ModelError, match=r"types and shapes cannot be inferred.*\n?.*Conv"):
        Model(model)


@pytest.mark.parametrize(("opset", "ir_version"), [(17, 8), (11, 6)])
def test_an_output_declared_wrong_has_its_computed_shape(opset: int, ir_version: int) -> None:
    model = models.mlp((3, 4, 1))
    model.opset_import[0].version, model.ir_version = opset, ir_version
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    x = np.ones((8, 3), np.float32)
    make(model, epochs=1).fit(x, x[:, :1])
    with pytest.raises(DataError, match=r"labels must have the shape \[batch, 1\]"):
        make(model, epochs=1).fit(x, x[:, [0, 0, 0, 0]])


def test_what_a_file_says_of_inner_tensors_need_not_be_right() -> None:
    model = models.mlp()
    model.graph.value_info.append(models.floats("m1", 1, 77))
    make(model, epochs=1).fit(*regression(rows=20, features=6))


def test_undefined_element_types_are_refused() -> None:
    model = models.linear()
    model.graph.input[0].type.tensor_type.elem_type = 999
    with pytest.raises(OrtflexError, match=r"999|type|no float parameter to train"):
        make(model, backend="fused").fit(*regression(rows=8))


def test_constants_that_are_malformed_are_not_folded() -> None:
    assert fold("Gather", [np.arange(3), np.array(7)], {}) is None
    assert fold("Squeeze", [np.ones((2, 1)), np.array(1)], {}) is None
    assert fold("Squeeze", [np.ones((2, 1)), np.array([1])], {}).tolist() == [1, 1]


def test_a_rule_that_fails_says_which_and_where() -> None:
    rules = Rules()

    @rules.rule("Tanh")
    def tanh(op: Any, n: Any, g: Any) -> Any:
        return [g * n.inputs[1]]

    trace = Trace({"": 17})
    x = trace.input("x", np.float32, (2,))
    with pytest.raises(GraphError, match="rule for Tanh of the family 'mine' fails on the node"):
        gradients([(trace.op.Tanh(x), None)], [x], RuleTable({"mine": rules}))


ORDERS = ([0, 0], [0, 1, 2], [0, 2], [-1, 0], [1, 1], [0] * 300_000, [0], [2**62, 0], [-2, -1])


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: str(o[:3]))
@pytest.mark.parametrize("known", [True, False], ids=["rank known", "rank unknown"])
def test_a_transpose_with_missing_axes_is_refused(order: list[int], known: bool) -> None:
    """Whatever a simplification leaves out is refused first where the runtime would refuse it."""
    model = models.linear()
    model.graph.node[0].output[0] = "before"
    first = "before"
    if not known:  # an undeclared operator hides the rank
        model.opset_import.add(domain="ai.onnx.ml", version=1)
        scaler = node("Scaler", [first], ["scaled"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0])
        model.graph.node.insert(1, scaler)
        first = "scaled"
    turned = node("Transpose", [first], ["XW"], perm=order)
    model.graph.node.insert(1 if known else 2, turned)
    x, y = regression(rows=4)
    for call in (lambda trainer: trainer.fit(x, y), lambda trainer: trainer.predict(x)):
        with pytest.raises(OrtflexError):
            call(make(model, backend="fused"))


@pytest.mark.parametrize("version", [-1, 2**31, 2**62])
@pytest.mark.parametrize("function", [True, False])
def test_an_opset_that_no_library_can_count_to(version: int, function: bool) -> None:
    """Of the model or of a function: onnx's tables of operators take an int."""
    model = calling(levels=2, calls=1)
    (model.functions[0] if function else model).opset_import[0].version = version
    with pytest.raises(ModelError, match=f"opset {version} does not exist"):
        Model(model)
