"""Shape arithmetic folded while a graph is traced equals what onnxruntime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Model, Trace, build, gradient_model
from ortflex_core.compiler.graph.constant_folding import LARGEST
from tests import models
from tests.gradcheck import run

SIZES = np.array([2, 3, 5, 7])


@pytest.mark.parametrize(
    "formula",
    [
        lambda op, v: op.Concat(v, [1, 4], axis=0),
        lambda op, v: op.Gather(v, op.constant(1), axis=0),
        lambda op, v: op.Gather(v, op.constant([-1, 0]), axis=0),
        lambda op, v: op.Unsqueeze(v, axes=[0, -1]),
        lambda op, v: op.Squeeze(op.Unsqueeze(v, axes=[0]), axes=[0]),
        lambda op, v: op.Slice(v, [1], [2**62]),
        lambda op, v: op.Slice(v, [-1], [-(2**62)], [0], [-1]),
        lambda op, v: op.Slice(v, [-1], [0], [0], [-2]),
        lambda op, v: op.Slice(v, [0], [-1], [-1], [2]),
        lambda op, v: (v + 2) * v - op.Gather(v, op.constant(0), axis=0),
        lambda op, v: op.Concat(op.Cast(v, to=1), op.constant([0.5]), axis=0),
        lambda op, v: op.Reshape(v, [2, -1]),
        lambda op, v: op.CastLike(v, op.constant(0.5)),
        lambda op, v: op.Range(op.Gather(v, op.constant(0)), op.Gather(v, op.constant(3)), 2),
        lambda op, v: op.Range(op.constant(7), op.Gather(v, op.constant(0)), -2),
        lambda op, v: op.Range(op.constant(7), op.Gather(v, op.constant(3)), 1),
        lambda op, v: op.ConstantOfShape(op.Slice(v, [0], [2])),
        lambda op, v: op.Expand(op.Slice(v, [0], [1]), [3]),
        lambda op, v: op.Where(op.Greater(v, 3), v, op.Mul(v, 2)),
        lambda op, v: op.Where(op.And(op.Less(v, 6), op.Not(op.Equal(v, 3))), v, -1),
        lambda op, v: op.Max(op.Min(v, 5), 3),
        lambda op, v: op.ReduceProd(v, keepdims=0),
        lambda op, v: op.ReduceSum(op.Reshape(v, [2, 2]), axes=[1]),
        lambda op, v: op.Div(v, 2),
    ],
)
def test_equals_the_runtime(formula: Any) -> None:
    trace, other = Trace({"": 17}), Trace({"": 17})
    folded = formula(trace.op, trace.constant(SIZES))
    assert folded.constant is not None
    program = build(other, {"y": formula(other.op, other.input("v", np.int64, (4,)))}, name="f")
    expected = run(program, {"v": SIZES})["y"]
    np.testing.assert_array_equal(folded.constant, expected)
    assert folded.constant.dtype == expected.dtype


def test_large_constants_and_unknown_operators_stay_nodes() -> None:
    op = Trace({"": 17}).op
    weights = op.constant(np.zeros(LARGEST + 1, np.float32))
    assert op.Concat(weights, weights, axis=0).constant is None
    assert op.Exp(op.constant([1.0])).constant is None
    assert op.Sub(op.constant([1]), op.constant([3])).constant is not None
    assert op.Add(op.constant([-1]), op.constant([3])).constant is None


def test_a_division_by_zero_is_left_to_the_runtime() -> None:
    """The quotient that numpy gives would be a wrong constant in silence."""
    op = Trace({"": 17}).op
    assert op.Div(op.constant([4, 4]), op.constant([2, 0])).constant is None


def test_sizes_between_unknown_ones_are_constants() -> None:
    trace = Trace({"": 17})
    op, x = trace.op, trace.input("x", np.float32, (None, 3, "n", 5))
    for limits, expected in (((1, 2), [3]), ((-1, None), [5]), ((-3, -2), [3])):
        sizes = op.Shape(x, start=limits[0], **({"end": limits[1]} if limits[1] else {}))
        np.testing.assert_array_equal(sizes.constant, expected)
    assert op.Shape(x, start=2).constant is None


def test_sizes_computed_by_nodes_of_a_file_are_known() -> None:
    """As torch's exporter cuts the gates of a recurrent layer out of its weights."""
    model = Model(
        onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]> net (float[N, 6] x, float[20, 5] w) => (float[N, 3] y)
        <int64[1] zero = {0}, int64 two = {2}> {
            size = Shape <start = 1, end = 2> (w)
            end = Mul (size, two)
            gate = Slice (w, size, end, zero)
            y = MatMul (x, gate)
        }""").SerializeToString()
    )
    assert (model.value("gate").shape or ())[0] not in (5, None)
    trace = Trace(model.opsets)
    given = {i.name: trace.input(i.name, i.dtype, i.shape) for i in model.inputs}
    assert model.replay(trace, ["gate"], given)["gate"].shape == (5, 5)


def test_the_rank_of_axes_from_a_range_survives_a_replay_with_its_own_inference() -> None:
    """GroupNorm as torch's dynamo exporter writes it.

    The class: a node of constants that onnx's inference of the file sees through, and the trace not.
    """
    model = Model(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["": 18]> g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y) '
            "<float[4] w = {1, 2, 3, 4}, int64 one = {1}, int64 three = {3}> "
            "{ d = Sub(three, one) l = Add(d, one) axes = Range(one, l, one) u = Unsqueeze(w, axes) "
            "y = Mul(x, u) }"
        )
    )
    for infer in (False, True):
        trace = Trace(model.opsets)
        given = {
            "x": trace.input("x", np.float32, (6, 4, 5, 5)),
            "w": trace.input("w", np.float32, (4,)),
        }
        (y,) = model.replay(trace, ["y"], given, infer=infer).values()
        assert y.node.inputs[1].shape == (4, 1, 1)
        assert [node.op_type for node in trace.nodes] == ["Unsqueeze", "Mul"]


# Shapes that a graph computes: the class "the rank is lost, or a branch that is not taken decides" ---


@pytest.mark.parametrize(
    ("shape", "length", "expected"),
    [
        ((2, 3), 3, (None, 2, 3)),
        ((1, 3), 2, (None, 3)),
        ((4, 1, 3), 1, (4, 1, 3)),
        ((4, 1, 3), 2, (4, None, 3)),
        ((), 2, (None, None)),
        (("N", 3), 2, (None, 3)),
        ((2, 3), None, None),
    ],
)
def test_the_number_of_sizes_decides_the_rank(
    shape: tuple[int | str, ...], length: int | None, expected: tuple[int | None, ...] | None
) -> None:
    trace = Trace({"": 20})
    x = trace.input("x", onnx.TensorProto.FLOAT, shape)
    sizes = trace.input("sizes", onnx.TensorProto.INT64, (length,))
    assert trace.op.Expand(x, sizes).shape == expected


EXPANDED = """<ir_version: 9, opset_import: ["": 20]>
g (float[2, 3] x, int64[3] sizes, float[3, 4] w) => (float y) {
    wide = Expand(x, sizes)
    product = MatMul(wide, w)
    square = Mul(product, product)
    y = ReduceSum<keepdims = 0>(square)
}"""
BRANCHES = """<ir_version: 9, opset_import: ["": 20]>
g (float[2, 3] x, int64[5] sizes) => (float[2, 3] y) {
    count = Size(sizes)
    four = Constant<value_int = 4>()
    short = Equal(count, four)
    last = If(short) <
        then_branch = t () => (int64[q] d) { a, b, c, d = Split<num_outputs = 4>(sizes) },
        else_branch = e () => (int64[r] h) { e, f, g, h, i = Split<num_outputs = 5>(sizes) }
    >
    factor = CastLike(last, x)
    y = Mul(x, factor)
}"""


def test_the_gradient_of_a_product_of_an_expanded_tensor() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3)), rng.normal(size=(3, 4))
    made = gradient_model(onnx.parser.parse_model(EXPANDED), ["x", "w"])
    feeds = {"x": x.astype("f"), "w": w.astype("f"), "sizes": np.array([5, 2, 3])}
    got = models.predict(made, feeds | {"cotangent/y": np.ones((), "f")})
    for name, wanted in {"x": 10 * x @ w @ w.T, "w": 10 * x.T @ x @ w}.items():
        np.testing.assert_allclose(got[f"gradient/{name}"], wanted, rtol=1e-5, atol=1e-4)


def test_a_branch_that_is_not_taken_may_have_a_size_that_onnx_infers_as_negative() -> None:
    made = gradient_model(onnx.parser.parse_model(BRANCHES), ["x"])
    feeds = {"x": np.ones((2, 3), "f"), "sizes": np.array([1, 2, 3, 7, 5])}
    got = models.predict(made, feeds | {"cotangent/y": np.ones((2, 3), "f")})
    for name, value in got.items():
        np.testing.assert_array_equal(value, np.full((2, 3), 7, "f"), err_msg=name)
