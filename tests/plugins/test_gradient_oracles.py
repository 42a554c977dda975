"""Gradients beside onnx-ad, beside the definitions of ai.onnx.ml, and those that rules omit.

The classes of defects: a pipeline has an operator of ai.onnx.ml between two parts with weights (a
projection, a scaler, a network); a rule returns None for a float input that matters, so a parameter there
gets no gradient by this way, without an error where it has another way to the loss.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from ortflex_core import (
    Array,
    NodeView,
    NoGradientRule,
    Tensor,
    Trace,
    build,
    gradient_model,
    gradients,
)
from ortflex_core.compiler.graph.ops import Node
from tests import models
from tests.gradcheck import RULES, run, traced
from tests.plugins.gradient_samples import every_case
from tests.tracing import NEWEST
from tests.training import plugins

# Inputs and what is made of them; float inputs lie in 0.1 … 0.9, away from kinks.
GRAPHS = {
    "layer": (
        "float[5,3] x, float[3,4] w, float[4] b",
        "p = MatMul(x, w) s = Add(p, b) y = Tanh(s)",
    ),
    "gemm": (
        "float[3,5] x, float[4,3] w, float[4] b",
        "y = Gemm<transA = 1, transB = 1, alpha = 0.5, beta = 2.0>(x, w, b)",
    ),
    "broadcast": ("float[2,1,3] x, float[4,1] w", "p = Mul(x, w) q = Div(p, x) y = Sub(q, w)"),
    "square": ("float[4] x", "p = Mul(x, x) y = Add(p, x)"),
    "power": ("float[2,3] x, float[3] w", "y = Pow(x, w)"),
    "logs": ("float[2,3] x", "p = Log(x) q = Sqrt(x) r = Exp(p) s = Add(q, r) y = Reciprocal(s)"),
    "activations": (
        "float[6] x",
        "p = Elu(x) q = Selu(p) r = LeakyRelu(q) s = Softplus(r) t = Softsign(s) y = Erf(t)",
    ),
    "softmax": ("float[3,4] x", "p = Softmax<axis = 0>(x) q = LogSoftmax(x) y = Mul(p, q)"),
    "reductions": (
        "float[3,4,2] x",
        "p = ReduceMean<axes = [1]>(x) q = ReduceSumSquare<axes = [0], keepdims = 1>(x) "
        "r = ReduceLogSumExp<axes = [2], keepdims = 1>(x) s = Add(p, q) t = Squeeze(r, last) "
        "u = ReduceMax<axes = [0], keepdims = 0>(t) v = Unsqueeze(u, last) y = Mul(s, v)",
    ),
    "shapes": (
        "float[2,6] x",
        "p = Transpose(x) q = Reshape(p, three) r = Slice(q, from, to) s = Concat<axis = 0>(r, q) "
        "t = Expand(s, wide) y = Pad(t, pads)",
    ),
    "words": ("float[5,3] x", "p = Gather(x, ids) y = ReduceL2<axes = [1]>(p)"),
    "choices": (
        "float[4,3] x, float[3] w",
        "c = Less(x, w) p = Where(c, x, w) q = Max(x, w) y = Mul(p, q)",
    ),
    "conv": (
        "float[2,3,7,6] x, float[4,3,3,2] w, float[4] b",
        # Other pads on the left than on the right move its gradient by a column (0.3; torch has ours).
        "y = Conv<strides = [2, 1], pads = [1, 1, 1, 1]>(x, w, b)",
    ),
    "pools": (
        "float[1,2,6,6] x",
        "p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) "
        "q = AveragePool<kernel_shape = [2, 2], strides = [1, 1]>(p) r = GlobalAveragePool(q) "
        "y = Mul(q, r)",
    ),
    "layer norm": (
        "float[2,3,4] x, float[4] w, float[4] b",
        "y = LayerNormalization<axis = -1>(x, w, b)",
    ),
    "instance norm": (
        "float[2,3,5] x, float[3] w, float[3] b",
        "y = InstanceNormalization(x, w, b)",
    ),
    "einsum": ("float[2,3,4] x, float[2,4,5] w", 'y = Einsum<equation = "bij,bjk->bki">(x, w)'),
    "attention": (
        "float[2,4,3] x, float[3,3] w",
        "q = MatMul(x, w) t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(q, t) a = Softmax(s) "
        "y = MatMul(a, x)",
    ),
    "sums": ("float[3,4] x", "p = CumSum(x, axis) y = Mul(p, x)"),
    "gru": (
        "float[4,2,3] x, float[1,15,3] w, float[1,15,5] r, float[1,30] b",
        "y = GRU<hidden_size = 5, linear_before_reset = 1>(x, w, r, b)",
    ),
    "lstm": (
        "float[4,2,3] x, float[1,20,3] w, float[1,20,5] r, float[1,40] b",
        "y = LSTM<hidden_size = 5>(x, w, r, b)",
    ),
}
CONSTANTS = (
    "int64[1] last = {-1}, int64[3] three = {3, 2, 2}, int64[1] from = {1}, int64[1] to = {3}, "
    "int64[3] wide = {5, 2, 2}, int64[6] pads = {1, 0, 0, 0, 2, 0}, int64[2] ids = {4, 4}, "
    "int64 axis = {1}"
)


def outputs_of(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    # onnx-ad leaves nodes without names; a fusion of onnxruntime 1.19 then makes two of one name.
    for k, node in enumerate(model.graph.node):
        node.name = node.name or f"node.{k}"
    return models.predict(model, {i.name: feeds[i.name] for i in model.graph.input})


@pytest.mark.parametrize("name", GRAPHS)
def test_agrees_with_onnx_ad(name: str) -> None:
    """It has rules of its own."""
    onnx_ad = pytest.importorskip("onnx_ad")
    inputs, nodes = GRAPHS[name]
    used = [
        c
        for c in re.split(r", (?=int64)", CONSTANTS)
        if f" {c.split()[1]})" in nodes or f" {c.split()[1]}," in nodes
    ]
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net ({inputs}) => (float y) '
        f"<{', '.join(used)}> {{{nodes}}}"
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    rng = np.random.default_rng(11)
    sizes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    feeds = {n: rng.uniform(0.1, 0.9, size).astype(np.float32) for n, size in sizes.items()}
    y = outputs_of(model, feeds)["y"]
    seed = rng.standard_normal(y.shape).astype(np.float32)
    wrt = list(feeds)
    ours = outputs_of(gradient_model(model, wrt=wrt), {**feeds, "cotangent/y": seed})
    # Its seeds have one more axis, for several of them at once.
    theirs = outputs_of(onnx_ad.reverse(model, layout="onnx"), {**feeds, "adj_y": seed[..., None]})
    for name in wrt:
        mine, other = ours[f"gradient/{name}"], theirs[f"adj_{name}"][..., 0]
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=name)


RNG = np.random.default_rng(5)
X = RNG.standard_normal((4, 3)).astype(np.float32)
HOLES = np.where(X > 0.8, np.float32(7), X)
OFFSET, SCALE = [0.5, -1.0, 2.0], [2.0, -0.5, 3.0]
COEFFICIENTS = RNG.standard_normal(6).astype(np.float32)
PLACES = np.array([2, 0, 2])


def made(operator: str, x: Array, outputs: int, **attributes: Any) -> onnx.ModelProto:
    inputs = ["x", "places"] if operator == "ArrayFeatureExtractor" else ["x"]
    node = models.helper.make_node(operator, inputs, ["y"], domain="ai.onnx.ml", **attributes)
    weights = {"places": PLACES} if len(inputs) > 1 else {}
    shape = ["N", *x.shape[1:]] if x.ndim > 1 else list(x.shape)
    y = models.floats("y", None, outputs)
    return models.model([node], [models.floats("x", *shape)], [y], weights, ai_onnx_ml=3)


def of_rows(x: Array, norm: Array) -> Array:
    return x / np.where(norm == 0, 1, norm)


Formula = Callable[[Array], Array]
CASES: dict[str, tuple[str, Array, dict[str, Any], Formula]] = {
    "columns": ("ArrayFeatureExtractor", X, {}, lambda x: x[:, PLACES]),
    "columns of a vector": ("ArrayFeatureExtractor", X[0], {}, lambda x: x[None, PLACES]),
    "scaler": ("Scaler", X, {"offset": OFFSET, "scale": SCALE}, lambda x: (x - OFFSET) * SCALE),
    "one scale": ("Scaler", X, {"offset": [0.5], "scale": [-3.0]}, lambda x: (x - 0.5) * -3),
    "imputer": (
        "Imputer",
        HOLES,
        {"imputed_value_floats": [0.25], "replaced_value_float": 7.0},
        lambda x: np.where(abs(x - 7) < 0.1, 0.25, x),
    ),
    "normalizer L1": (
        "Normalizer",
        X,
        {"norm": "L1"},
        lambda x: of_rows(x, np.abs(x).sum(1)[:, None]),
    ),
    "normalizer L2": (
        "Normalizer",
        X,
        {"norm": "L2"},
        lambda x: of_rows(x, np.sqrt((x * x).sum(1, keepdims=True))),
    ),
    "linear regressor": (
        "LinearRegressor",
        X,
        {"coefficients": COEFFICIENTS.tolist(), "intercepts": [0.5, 1.0], "targets": 2},
        lambda x: x @ COEFFICIENTS.reshape(2, 3).T + [0.5, 1.0],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_central_differences(name: str) -> None:
    operator, x, attributes, formula = CASES[name]
    wanted = formula(x.astype(np.float64))
    proto = made(operator, x, wanted.shape[1], **attributes)
    g = np.random.default_rng(1).standard_normal(wanted.shape).astype(np.float32)
    program = gradient_model(proto, ["x"], plugins=plugins())
    got = models.predict(program, {"x": x, "cotangent/y": g})
    np.testing.assert_allclose(got["y"], wanted, rtol=1e-5, atol=1e-6)
    expected = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        step = np.zeros(x.shape)
        step[place] = 1e-6
        difference = formula(x + step) - formula(x - step)
        expected[place] = (difference * g).sum() / 2e-6
    np.testing.assert_allclose(got["gradient/x"], expected, rtol=1e-4, atol=1e-5)


def test_forms_without_a_rule_are_named() -> None:
    with pytest.raises(NoGradientRule, match="norm='MAX'"):
        gradient_model(made("Normalizer", X, 3, norm="MAX"), ["x"], plugins=plugins())


@pytest.mark.parametrize(("length", "refused"), [(4, False), (5, False), (7, True), (2, True)])
def test_half_a_spectrum_of_another_length_has_no_gradient(length: int, refused: bool) -> None:
    """A real signal of 7 places has 4 frequencies; onnxruntime computes one of 3 incorrectly."""
    trace = Trace({"": 20})
    x = trace.input("x", "f4", (2, 3, 2))
    y = trace.op.DFT(x, length, 1, inverse=1, onesided=1)
    expected = pytest.raises(NoGradientRule, match=f"of 3 for {length} places")
    with expected if refused else contextlib.nullcontext():
        gradients([(trace.op.ReduceSum(y, keepdims=0), None)], [x], RULES)


# An input that a rule gives no gradient has the slope 0, or asking for its gradient is refused. ---


def copied(
    node: Node, opsets: Mapping[str, int], arrays: Mapping[str, Array], free: int
) -> tuple[Trace, tuple[Tensor, ...]]:
    """The node alone in a graph; its inputs i0, i1 … are the graph's, ``free`` even if constant."""
    trace = Trace(opsets)
    inputs: list[Tensor | None] = []
    for k, given in enumerate(node.inputs):
        if given is None:
            inputs.append(None)
        elif given.constant is not None and k != free:
            inputs.append(trace.constant(given.constant, given.dtype))
        else:
            inputs.append(trace.input(f"i{k}", given.dtype, arrays[f"i{k}"].shape))
    outputs = trace.node(
        node.op_type, inputs, node.attributes, outputs=len(node.outputs), domain=node.domain
    )
    return trace, outputs


def omits(node: Node, opsets: Mapping[str, int], arrays: Mapping[str, Array], index: int) -> bool:
    """Whether the rule answers None for a float input that alone is differentiated by."""
    trace, outputs = copied(node, opsets, arrays, index)
    made = outputs[0].node
    if made is None:  # simplified away
        return False
    _, rule = RULES.lookup(made.domain, made.op_type, opsets.get(made.domain, 1))
    if rule is None:
        return False
    seeds = [trace.constant(np.ones(()), o.dtype) if o.is_float else None for o in outputs]
    try:
        found = rule(trace.op, NodeView(trace, made, frozenset([index]), RULES), *seeds)
        return found[index] is None
    except NoGradientRule:
        return False


def slopes(
    node: Node, opsets: Mapping[str, int], arrays: Mapping[str, Array], index: int, reference: bool
) -> list[float]:
    """Central differences of the weighted sum of a node's float outputs, for a few elements.

    Those that grow when the step shrinks tell of a jump, not of a slope, and are left out.
    """
    trace, outputs = copied(node, opsets, arrays, index)
    named = {f"o{k}": t for k, t in enumerate(outputs) if t.is_float}
    program = build(trace, named, name="node")
    step = 1e-6 if arrays[f"i{index}"].dtype == np.float64 else 1e-3

    def total(place: int, move: float) -> float:
        moved = arrays[f"i{index}"].copy()
        moved.reshape(-1)[place] += move
        found = run(program, {**arrays, f"i{index}": moved}, reference=reference).values()
        return sum(float(v.reshape(-1) @ np.cos(np.arange(v.size) + 1)) for v in found)

    def slope(place: int, size: float) -> float:
        return (total(place, size) - total(place, -size)) / (2 * size)

    places = range(min(arrays[f"i{index}"].size, 6))
    both = [(slope(k, step), slope(k, step / 4)) for k in places]
    return [near for far, near in both if abs(near) <= 2 * abs(far)]


def omissions() -> Iterator[str]:
    """Operators with an input that has a slope, but neither a gradient nor a refusal."""
    seen: set[object] = set()
    for case in every_case(3):
        if case.since > NEWEST:
            continue
        dtype = np.float32 if case.oracle is not None else case.dtypes[0]
        given = {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in case.arrays.items()}
        reference = case.reference and dtype == np.float64
        opset = min(NEWEST, case.until)
        trace, _, _ = traced(case.formula, given, opset, "sizes")
        for node in list(trace.nodes):
            attributes = {n: a.SerializeToString() for n, a in node.attributes.items()}
            key = (node.op_type, str(attributes), *(t is None for t in node.inputs))
            if key in seen or node.captures or RULES.rounds(node.domain, node.op_type):
                continue  # one that rounds is passed straight through, which is a choice
            seen.add(key)
            tensors = {f"i{k}": t for k, t in enumerate(node.inputs) if t is not None}
            arrays: Mapping[str, Array] | None = None
            for index, tensor in enumerate(node.inputs):
                if (
                    tensor is None
                    or not tensor.is_float
                    or not any(o.is_float for o in node.outputs)
                ):
                    continue
                if arrays is None:
                    program = build(trace, tensors, name="inputs")
                    arrays = run(program, given, reference=reference)
                if arrays[f"i{index}"].size and omits(node, trace.opsets, arrays, index):
                    slope = slopes(node, trace.opsets, arrays, index, reference)
                    if max(map(abs, slope), default=0) > 1e-3:
                        yield f"{node.op_type}, input {index} ({case.name}): {slope}"


@pytest.mark.sampled
def test_input_without_a_gradient_has_no_slope() -> None:
    assert not list(omissions())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("operator", "place", "words"),
    [
        ("Resize", 1, "by its input roi"),
        ("Resize", 2, "by its input scales"),
        ("RoiAlign", 1, "by its regions"),
        ("Dropout", 1, "by its input ratio"),
    ],
)
def test_refused_where_another_way_has_a_gradient(operator: str, place: int, words: str) -> None:
    """The parameter also reaches the loss by a sum, so that what is left out would not be noticed."""
    trace = Trace({"": 18})
    x, p = trace.input("x", np.float32, (1, 1, 4, 4)), trace.input("p", np.float32, (2, 4))
    op = trace.op
    if operator == "Resize":
        given: list[Tensor | None] = [x, op.Reshape(p, [-1]), op.constant([1.0, 1.0, 1.5, 1.5])]
        if place == 2:
            given[1:] = [None, op.Reshape(op.Slice(p, [0], [1], [0]), [-1])]
        how = "tf_crop_and_resize" if place == 1 else "half_pixel"
        y = op.Resize(*given, mode="linear", coordinate_transformation_mode=how)
    elif operator == "RoiAlign":
        y = op.RoiAlign(x, p, op.constant([0, 0]), output_height=2, output_width=2)
    else:
        y = op.Dropout(x, op.ReduceMax(p, keepdims=0), op.constant(True))
    loss = op.ReduceSum(y, keepdims=0) + op.ReduceSum(p, keepdims=0)
    with pytest.raises(NoGradientRule, match=words):
        gradients([(loss, None)], [p], RULES)
    assert gradients([(loss, None)], [x], RULES)


@pytest.mark.sampled
def test_a_deformed_convolution_needs_the_sizes_of_its_weights() -> None:
    trace = Trace({"": 19})
    x = trace.input("x", np.float32, (1, 2, 5, 5))
    offset = trace.input("offset", np.float32, (1, 18, 3, 3))
    for rows, refused in (("rows", True), (4, False)):
        weight = trace.input(f"w {rows}", np.float32, (rows, 2, 3, 3))
        loss = trace.op.ReduceSum(trace.op.DeformConv(x, weight, offset), keepdims=0)
        if refused:
            with pytest.raises(NoGradientRule, match="weights of unknown shape"):
                gradients([(loss, None)], [x], RULES)
        else:
            assert gradients([(loss, None)], [x], RULES)
