"""Symbolic tensors: promotion, folding, equal nodes, errors.

Shape arithmetic that is folded while a graph is traced equals what onnxruntime computes.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from ortflex_core import GraphError, Host, Model, Tensor, Trace, build, gradient_model
from ortflex_core.compiler.graph import inference
from ortflex_core.compiler.graph.constant_folding import LARGEST
from ortflex_core.compiler.graph.ops import Node
from tests import models
from tests.gradcheck import run


@pytest.fixture
def trace() -> Trace:
    return Trace({"": 17})


@pytest.fixture
def x(trace: Trace) -> Tensor:
    return trace.input("x", np.float32, ("N", 3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64, np.int32])
def test_numbers_take_the_tensors_type(trace: Trace, dtype: Any) -> None:
    t = trace.input("t", dtype, (2,))
    assert (t + 1).dtype == (2 * t).dtype == t.dtype
    assert trace.op.Where(t > 1, t, 0).dtype == t.dtype


def test_arrays_keep_their_type(trace: Trace, x: Tensor) -> None:
    with pytest.raises(GraphError, match=r"Add\(<x: float32\[N, 3\]>.*ill-typed"):
        x + np.ones(3)
    assert (x + np.ones(3, np.float32)).dtype == TensorProto.FLOAT


def test_a_float_with_integer_tensors_is_refused(trace: Trace) -> None:
    t = trace.input("t", np.int64, (2,))
    with pytest.raises(GraphError, match=r"Mul: the float 0.5 .* tensor of int64; cast .*op\.Cast"):
        t * 0.5


FORMULAS = ("x + y", "2 - x * y", "x - 1", "x / y", "1 / y", "y**2", "-x", "abs(x)", "x @ y")


@pytest.mark.parametrize("formula", [*FORMULAS, "x < y", "x > y", "x <= y", "x >= y"])
def test_python_operators(trace: Trace, formula: str) -> None:
    arrays = {"x": np.eye(2) - 0.3, "y": np.array([[2.0, 0.5], [1.0, 3.0]])}
    tensors = {n: trace.input(n, a.dtype, a.shape) for n, a in arrays.items()}
    got = run(build(trace, {"out": eval(formula, {}, tensors)}, name="p"), arrays)["out"]
    np.testing.assert_allclose(got, eval(formula, {}, arrays), rtol=1e-15)


def test_a_tensor_has_neither_truth_value_nor_elements(x: Tensor) -> None:
    with pytest.raises(GraphError, match=r"<Greater: bool\[N, 3\]> has no value .* op\.Where"):
        bool(x > 0)
    with pytest.raises(TypeError):
        iter(x)  # type: ignore[call-overload]


def test_numpy_leaves_arithmetic_to_the_tensor(x: Tensor) -> None:
    assert isinstance(np.float32(2) * x, Tensor)
    assert isinstance(np.ones(3, np.float32) * x, Tensor)


def test_equality_is_identity(trace: Trace, x: Tensor) -> None:
    y = trace.input("y", np.float32, ("N", 3))
    assert x == x
    assert x != y
    assert len({x: 1, y: 2}) == 2
    assert not trace.nodes


def test_nodes_that_change_nothing_vanish(trace: Trace, x: Tensor) -> None:
    same = [1.0 * x, x * 1.0, x / 1.0, x + 0.0, 0.0 + x, x - 0.0, trace.op.Identity(x)]
    assert all(t is x for t in same)
    assert trace.op.Cast(x, to=x.dtype) is x
    assert trace.op.Transpose(x, perm=[0, 1]) is x
    assert not trace.nodes
    assert trace.op.Transpose(x, perm=[1, 0]) is not x


def test_a_factor_of_another_rank_is_kept(trace: Trace, x: Tensor) -> None:
    # A one of shape [1, 1, 1] adds an axis.
    assert (x * np.ones((1, 1, 1), np.float32)).rank == 3


def test_scalar_factors_are_joined_also_on_the_host(trace: Trace, x: Tensor) -> None:
    y = -(2.0 * (x * 3.0))
    assert y.node is not None
    assert [i.constant for i in y.node.arguments if i.constant is not None] == [np.array(-6.0)]
    rate, weight = Host.symbol("rate"), Host.symbol("weight")
    bound = trace.bind(rate, x.dtype)
    for tensor, joined in (
        (y, []),
        (rate * (2 * (weight * x)), ["Mul(rate, Mul(2.0, weight))"]),
        (x * (1 - bound * 2), ["Sub(1.0, Mul(rate, 2.0))"]),
    ):
        program = build(trace, {"y": tensor}, name="p")
        assert [repr(h.expression) for h in program.hosts] == joined
        assert program.nodes == 1


def test_constants_are_cast_while_the_graph_is_built(trace: Trace) -> None:
    cast = trace.op.Cast(trace.constant(np.array([1.5, -2.5])), to=TensorProto.INT64)
    assert cast.constant is not None
    assert cast.constant.tolist() == [1, -2]
    bound = trace.op.Cast(trace.bind(Host.symbol("a"), 1), to=TensorProto.DOUBLE)
    assert (bound.host, bound.dtype) == (Host.symbol("a"), TensorProto.DOUBLE)
    assert not trace.nodes


def test_known_shapes_are_constants(trace: Trace, x: Tensor) -> None:
    fixed = trace.input("fixed", np.float32, (2, 5))
    assert trace.op.Shape(fixed).constant.tolist() == [2, 5]
    assert trace.op.Size(fixed).constant.item() == 10
    assert trace.op.Shape(x).constant is None
    assert trace.op.Shape(fixed, start=1).constant.tolist() == [5]


def test_equal_nodes_are_one(trace: Trace, x: Tensor) -> None:
    op = trace.op
    assert op.Exp(x) is op.Exp(x)
    assert op.Softmax(x, axis=1) is op.Softmax(x, axis=1)
    assert op.Softmax(x, axis=1) is not op.Softmax(x, axis=0)
    assert op.Sub(x, op.Exp(x)) is not op.Sub(op.Exp(x), x)
    assert trace.constant(1.0) is trace.constant(1.0)
    assert trace.constant(1.0) is not trace.constant(1)
    assert trace.constant(0.0) is not trace.constant(-0.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda op, x: op.Dropout(x, 0.5, op.constant(True)),
        lambda op, x: op.RandomNormalLike(x),
        lambda op, x: op.RandomUniform(shape=[2]),
        lambda op, x: op.Bernoulli(x),
    ],
)
def test_random_nodes_are_never_merged(trace: Trace, x: Tensor, call: Any) -> None:
    assert call(trace.op, x) is not call(trace.op, x)
    assert len(trace.nodes) == 2


def test_what_is_an_input_here_and_an_attribute_there_has_one_name() -> None:
    for opset in (13, 18):
        trace = Trace({"": opset})
        y = trace.op.ReduceMax(trace.input("x", np.float32, (2, 3)), axes=[1], keepdims=0)
        assert y.shape == (2,)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda op, x: op.Sofmax(x), "no operator 'Sofmax'; did you mean 'Softmax'"),
        (lambda op, x: op.Gelu(x), r"the operator Gelu is not in ai\.onnx opset 17 yet"),
        (
            lambda op, x: op.Softmax(x, axes=1),
            "Softmax has no attribute 'axes' at opset 13; did you",
        ),
        (lambda op, x: op.Exp(x, x), "Exp takes at most 1 inputs, got 2"),
        (lambda op, x: op.MatMul(x, x), "MatMul.* is ill-typed: .*[Ii]ncompatible dimensions"),
        (
            lambda op, x: x + Trace({"": 17}).input("other", np.float32, (3,)),
            "Add mixes tensors of two graphs: <other: float32",
        ),
    ],
)
def test_errors_name_what_is_wrong(trace: Trace, call: Any, reason: str) -> None:
    fixed = trace.input("fixed", np.float32, (2, 3))
    with pytest.raises(GraphError, match=reason):
        call(trace.op, fixed)


def test_two_inputs_of_one_name_are_refused(trace: Trace, x: Tensor) -> None:
    with pytest.raises(GraphError, match="two inputs named 'x'"):
        trace.input("x", np.float32, ())


def test_several_outputs_come_as_a_tuple(trace: Trace) -> None:
    t = trace.input("t", np.float32, (5,))
    values, index = trace.op("TopK", t, [2], outputs=2)
    assert (values.shape, index.dtype) == ((2,), TensorProto.INT64)


def test_symbolic_sizes_survive(x: Tensor) -> None:
    assert (x * 2 + 1).shape == ("N", 3)
    assert repr(x.trace.op.Abs(x)) == "<Abs: float32[N, 3]>"


REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_over_no_axes_is_written_without_it(name: str) -> None:
    """onnxruntime 1.16 reduces over all axes then."""
    trace = Trace({"": 18})
    x = trace.input("x", np.float32, (2, 3))
    made = trace.op(f"Reduce{name}", x, trace.op.constant([]), noop_with_empty_axes=1)
    assert not [n for n in trace.nodes if n.op_type.startswith("Reduce")]
    value = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
    wanted = {"LogSum": np.log(value), "SumSquare": value * value}.get(name, value)
    got = run(build(trace, {"y": trace.op.Identity(made)}, name="reduced"), {"x": value})["y"]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_empty_lists_take_the_type_of_their_place(opset: int) -> None:
    """The class: an empty Python list has no element to tell its type by."""
    trace = Trace({"": opset})
    x, scalar = trace.input("x", np.float32, (2, 3)), trace.input("s", np.float32, ())
    op = trace.op
    assert op.Squeeze(x, axes=[]).shape == op.Unsqueeze(x, axes=[]).shape == (2, 3)
    assert op.Tile(scalar, []).shape == op.Reshape(scalar, []).shape == ()
    assert op.Expand(scalar, []).shape == ()
    assert op.Slice(x, [], [], [], []).shape == (2, 3)
    assert op.Pad(scalar, []).shape == ()
    assert op.ReduceSum(x, axes=[], noop_with_empty_axes=1).shape == (2, 3)
    assert op.Concat(op.Shape(x), op.constant([]), axis=0).shape == (2,)
    assert op.constant([], TensorProto.FLOAT).dtype == TensorProto.FLOAT
    assert op.constant(np.zeros(0, np.float32)).dtype == TensorProto.FLOAT
    assert op.Mul(op.Reshape(x, [-1]), [1.0]).dtype == TensorProto.FLOAT


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div", "Abs", "Exp", "Sqrt", "Pow"])
def test_types_found_by_the_short_way_are_those_of_onnx(op_type: str) -> None:
    """Every pair of shapes and element types, those included that do not go together."""
    arity = 1 if op_type in ("Abs", "Exp", "Sqrt") else 2
    shapes: list[Any] = [(), (3,), (1,), (2, 3), (0, 3), ("N", 3), (None, 3), None]
    pairs = itertools.product(shapes, [np.float32, np.float64, np.int64])
    for places in itertools.product(list(pairs), repeat=arity):
        trace = Trace({"": 17})
        inputs = [trace.input(f"i{k}", d, s) for k, (s, d) in enumerate(places)]
        node = Node(op_type, "", tuple(inputs), {}, {})
        short = inference._arithmetic(trace, node)
        if short is not None:
            assert short == inference._inferred(trace, node, 1)


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


def test_large_constants_unknown_operators_and_divisions_by_zero_stay_nodes() -> None:
    op = Trace({"": 17}).op
    weights = op.constant(np.zeros(LARGEST + 1, np.float32))
    assert op.Concat(weights, weights, axis=0).constant is None
    assert op.Exp(op.constant([1.0])).constant is None
    assert op.Sub(op.constant([1]), op.constant([3])).constant is not None
    assert op.Add(op.constant([-1]), op.constant([3])).constant is None
    # The quotient by zero that numpy gives would be a wrong constant in silence.
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
    body = """size = Shape <start = 1, end = 2> (w)  end = Mul (size, two)
        gate = Slice (w, size, end, zero)  y = MatMul (x, gate)"""
    weights = {"zero": np.array([0]), "two": np.array(2)}
    model = Model(models.parsed(body, weights, "float[N, 6] x, float[20, 5] w", "float[N, 3] y"))
    assert (model.value("gate").shape or ())[0] not in (5, None)
    trace = Trace(model.opsets)
    given = {i.name: trace.input(i.name, i.dtype, i.shape) for i in model.inputs}
    assert model.replay(trace, ["gate"], given)["gate"].shape == (5, 5)


def test_the_rank_of_axes_from_a_range_survives_a_replay_with_its_own_inference() -> None:
    """GroupNorm as torch's dynamo exporter writes it.

    The class: a node of constants that onnx's inference of the file sees through, and the trace not.
    """
    body = """d = Sub(three, one)  l = Add(d, one)  axes = Range(one, l, one)
        u = Unsqueeze(w, axes)  y = Mul(x, u)"""
    weights = {"w": np.arange(4.0), "one": np.array(1), "three": np.array(3)}
    shape = "float[N, 4, 5, 5]"
    model = Model(models.parsed(body, weights, f"{shape} x", f"{shape} y", opset=18))
    for infer in (False, True):
        trace, shapes = Trace(model.opsets), {"x": (6, 4, 5, 5), "w": (4,)}
        given = {name: trace.input(name, np.float32, size) for name, size in shapes.items()}
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


def test_the_gradient_of_a_product_of_an_expanded_tensor() -> None:
    body = """wide = Expand(x, sizes)  product = MatMul(wide, w)
        square = Mul(product, product)  y = ReduceSum<keepdims = 0>(square)"""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3)), rng.normal(size=(3, 4))
    inputs = "float[2, 3] x, int64[3] sizes, float[3, 4] w"
    made = gradient_model(models.parsed(body, {}, inputs, "float y", opset=20), ["x", "w"])
    feeds = {"x": x.astype("f"), "w": w.astype("f"), "sizes": np.array([5, 2, 3])}
    got = models.predict(made, feeds | {"cotangent/y": np.ones((), "f")})
    for name, wanted in {"x": 10 * x @ w @ w.T, "w": 10 * x.T @ x @ w}.items():
        np.testing.assert_allclose(got[f"gradient/{name}"], wanted, rtol=1e-5, atol=1e-4)


def test_a_branch_that_is_not_taken_may_have_a_size_that_onnx_infers_as_negative() -> None:
    body = """count = Size(sizes)  four = Constant<value_int = 4>()  short = Equal(count, four)
        last = If(short) <
            then_branch = t () => (int64[q] d) { a, b, c, d = Split<num_outputs = 4>(sizes) },
            else_branch = e () => (int64[r] h) { e, f, g, h, i = Split<num_outputs = 5>(sizes) }
        >  factor = CastLike(last, x)  y = Mul(x, factor)"""
    values = "float[2, 3] x, int64[5] sizes", "float[2, 3] y"
    made = gradient_model(models.parsed(body, {}, *values, opset=20), ["x"])
    feeds = {"x": np.ones((2, 3), "f"), "sizes": np.array([1, 2, 3, 7, 5])}
    got = models.predict(made, feeds | {"cotangent/y": np.ones((2, 3), "f")})
    for name, value in got.items():
        np.testing.assert_array_equal(value, np.full((2, 3), 7, "f"), err_msg=name)
