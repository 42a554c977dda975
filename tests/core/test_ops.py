"""Symbolic tensors: promotion, folding, equal nodes, errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from ortflex_core import GraphError, Host, Tensor, Trace, build
from ortflex_core.compiler.graph import inference
from ortflex_core.compiler.graph.ops import Node
from tests.gradcheck import run


@pytest.fixture
def trace() -> Trace:
    return Trace({"": 17})


@pytest.fixture
def x(trace: Trace) -> Tensor:
    return trace.input("x", np.float32, ("N", 3))


def kinds(trace: Trace) -> list[str]:
    return [node.op_type for node in trace.nodes]


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


@pytest.mark.parametrize(
    "formula",
    [
        *("x + y", "2 - x * y", "x - 1", "x / y", "1 / y", "y**2", "-x", "abs(x)", "x @ y"),
        *("x < y", "x > y", "x <= y", "x >= y"),
    ],
)
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
    assert kinds(trace) == []


def test_nodes_that_change_nothing_vanish(trace: Trace, x: Tensor) -> None:
    same = [1.0 * x, x * 1.0, x / 1.0, x + 0.0, 0.0 + x, x - 0.0, trace.op.Identity(x)]
    assert all(t is x for t in same)
    assert trace.op.Cast(x, to=x.dtype) is x
    assert trace.op.Transpose(x, perm=[0, 1]) is x
    assert kinds(trace) == []
    assert trace.op.Transpose(x, perm=[1, 0]) is not x


def test_a_factor_of_another_rank_is_kept(trace: Trace, x: Tensor) -> None:
    # A one of shape [1, 1, 1] adds an axis.
    assert (x * np.ones((1, 1, 1), np.float32)).rank == 3


def test_scalar_factors_are_joined(trace: Trace, x: Tensor) -> None:
    y = -(2.0 * (x * 3.0))
    assert y.node is not None
    factors = [i.constant for i in y.node.arguments if i.constant is not None]
    assert factors == [np.array(-6.0)]
    assert build(trace, {"y": y}, name="p").hosts == ()


def test_scalar_factors_are_joined_on_the_host(trace: Trace, x: Tensor) -> None:
    rate, weight = Host.symbol("rate"), Host.symbol("weight")
    program = build(trace, {"y": rate * (2 * (weight * x))}, name="p")
    assert [repr(h.expression) for h in program.hosts] == ["Mul(rate, Mul(2.0, weight))"]
    assert program.nodes == 1

    rate = trace.bind(Host.symbol("rate"), x.dtype)
    program = build(trace, {"y": x * (1 - rate * 2)}, name="p")
    assert [repr(h.expression) for h in program.hosts] == ["Sub(1.0, Mul(rate, 2.0))"]
    assert program.nodes == 1


def test_constants_are_cast_while_the_graph_is_built(trace: Trace) -> None:
    cast = trace.op.Cast(trace.constant(np.array([1.5, -2.5])), to=TensorProto.INT64)
    assert cast.constant is not None
    assert cast.constant.tolist() == [1, -2]
    bound = trace.op.Cast(trace.bind(Host.symbol("a"), 1), to=TensorProto.DOUBLE)
    assert (bound.host, bound.dtype) == (Host.symbol("a"), TensorProto.DOUBLE)
    assert kinds(trace) == []


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
    assert not [kind for kind in kinds(trace) if kind.startswith("Reduce")]
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
