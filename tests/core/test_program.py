"""From a trace to a model: names, outputs, opsets, host inputs, subgraphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, parser

from ortflex_core import GraphError, Host, HostProgram, Program, Tensor, Trace, build
from ortflex_core.compiler.graph.program import ir_for
from tests.gradcheck import run
from tests.tracing import OPSETS
from tests.training import same

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def started(opset: int = 17) -> tuple[Trace, Any, Tensor]:
    trace = Trace({"": opset})
    return trace, trace.op, trace.input("x", np.float32, ("N", 3))


def names(program: Program) -> list[str]:
    return [output for node in program.proto().graph.node for output in node.output]


def test_outputs_carry_the_names_asked_for_in_their_order() -> None:
    trace, op, x = started()
    program = build(trace, {"second": op.Exp(x), "first": op.Exp(x) + 1}, name="p")
    assert {(o.dtype, o.shape) for o in program.outputs} == {(TensorProto.FLOAT, ("N", 3))}
    assert [o.name for o in program.outputs] == names(program) == ["second", "first"]
    assert program.nodes == 2


def test_inputs_constants_and_twins_are_copied_to_their_names() -> None:
    trace, op, x = started()
    y = op.Exp(x)
    outputs = {"same": x, "y": y, "twin": y, "number": op.constant(2.5)}
    program = build(trace, outputs, name="p")
    got = run(program, {"x": X})
    np.testing.assert_array_equal(got["same"], X)
    np.testing.assert_array_equal(got["y"], got["twin"])
    assert got["number"] == np.float32(2.5)
    assert program.nodes == 4
    onnx.checker.check_model(program.proto(), full_check=True)


def waiting(program: Program) -> int:
    """The most nodes that could run and don't yet, in the order of the file."""
    nodes = program.proto().graph.node
    made = {o: k for k, node in enumerate(nodes) for o in node.output}
    ready = [max((made[i] + 1 for i in n.input if i in made), default=0) for n in nodes]
    return max(sum(r <= k < at for at, r in enumerate(ready)) for k in range(len(nodes)))


def test_in_long_graphs_few_nodes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain() -> Program:
        trace, op, x = started()
        values, backward = [x], x
        for _ in range(40):
            values.append(op.Tanh(values[-1]))
        for value in reversed(values):
            backward = backward * (1 - value * value)
        return build(trace, {"last": values[-1], "backward": backward}, name="p")

    usual = chain()
    monkeypatch.setattr("ortflex_core.compiler.graph.program._MANY", 0)
    sorted_ = chain()
    assert waiting(usual) == 40
    assert waiting(sorted_) <= 3
    onnx.checker.check_model(sorted_.proto(), full_check=True)
    same(run(sorted_, {"x": X}), run(usual, {"x": X}), 0)


def test_only_what_an_output_needs_is_there() -> None:
    trace, op, x = started()
    unused = trace.input("unused", np.float32, (4,))
    op.Exp(unused)
    trace.bind(Host.symbol("rate"), 1)
    program = build(trace, {"y": op.Neg(x)}, name="p")
    assert [i.name for i in program.inputs] == ["x"]
    assert program.hosts == ()
    assert program.nodes == 1


def test_names_never_collide() -> None:
    trace, op, x = started()
    taken = trace.input("Exp.1", np.float32, ("N", 3))
    program = build(trace, {"Exp.2": op.Exp(op.Exp(x)) + taken}, name="p")
    graph = program.proto().graph
    onnx.checker.check_model(program.proto(), full_check=True)
    for given in ([i.name for i in graph.input] + names(program), [n.name for n in graph.node]):
        assert len(set(given)) == len(given)
    got = run(program, {"x": X / 9, "Exp.1": X})["Exp.2"]
    np.testing.assert_allclose(got, np.exp(np.exp(X / 9)) + X, rtol=1e-6)


def test_an_output_named_as_an_input_is_refused() -> None:
    trace, op, x = started()
    with pytest.raises(GraphError, match="step: 'x' names both an input and an output"):
        build(trace, {"x": op.Neg(x)}, name="step")


@pytest.mark.parametrize("opset", OPSETS)
def test_the_model_runs_at_its_opset(opset: int) -> None:
    trace, op, x = started(opset)
    program = build(trace, {"y": op.ReduceSum(x, axes=[1])}, name="p")
    proto = program.proto()
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", opset)]
    assert proto.ir_version == ir_for(opset)
    np.testing.assert_array_equal(run(program, {"x": X})["y"], X.sum(1, keepdims=True))


@pytest.mark.parametrize(
    ("opset", "ir"), [(13, 8), (18, 8), (19, 9), (20, 9), (21, 10), (23, 11), (25, 13)]
)
def test_ir_came_out_with_the_opset_or_before(opset: int, ir: int) -> None:
    assert ir_for(opset) == ir
    assert onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)]) <= ir


def test_host_expressions_are_inputs_of_rank_0() -> None:
    trace, _, x = started()
    rate, step = Host.symbol("rate"), Host.symbol("step")
    y = x * (rate / (1 - 0.9**step)) + x * rate
    program = build(trace, {"y": y}, name="p")
    assert [(h.spec.dtype, h.spec.shape) for h in program.hosts] == [(1, ()), (1, ())]
    found = HostProgram([h.expression for h in program.hosts])({"rate": 0.5, "step": 2})
    specs = [host.spec for host in program.hosts]
    feeds = {s.name: np.array(v, s.numpy) for s, v in zip(specs, found, strict=True)}
    model = program.proto()
    assert {i.name for i in model.graph.input} == {"x", *feeds}
    got = onnx.reference.ReferenceEvaluator(model).run(None, {"x": X, **feeds})[0]
    np.testing.assert_allclose(got, X * (0.5 / 0.19 + 0.5), rtol=1e-6)


def test_equal_formulas_are_equal_bytes() -> None:
    def one() -> Program:
        trace, op, x = started()
        rate = Host.symbol("rate")
        y = op.Softmax(x @ np.ones((3, 3), np.float32), axis=1) * rate
        return build(trace, {"y": y, "z": op.ReduceSum(y * y, keepdims=0)}, name="p")

    assert one().model == one().model
    assert one().key == one().key
    trace, op, x = started()
    assert build(trace, {"y": op.Neg(x)}, name="p").key != one().key


def conditional(trace: Trace, flag: Tensor, outer: Tensor, captured: str) -> Tensor:
    """If flag: outer + 1, else outer, which the branches read under the name ``captured``."""
    attributes = {}
    for branch, body in (("then_branch", "t = Add(%s, one)"), ("else_branch", "t = Identity(%s)")):
        text = f"g () => (float[N,3] t) <float one = {{1}}> {{ {body % captured} }}"
        attributes[branch] = onnx.helper.make_attribute(branch, parser.parse_graph(text))
    types = [(outer.dtype, outer.shape)]
    return trace.node("If", [flag], attributes, captures={captured: outer}, types=types)[0]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("output", ["y", "t"])
def test_subgraphs_follow_the_new_names_of_what_they_read(flag: bool, output: str) -> None:
    # The outer value is computed and gets a name of its own; "t" is the branches' own name too.
    trace, op, x = started()
    condition = trace.input("flag", np.bool_, ())
    inner = conditional(trace, condition, op.Exp(x), "captured")
    program = build(trace, {output: inner * 2}, name="p")
    assert {i.name for i in program.inputs} == {"x", "flag"}
    assert [n.op_type for n in program.proto().graph.node] == ["Exp", "If", "Mul"]
    onnx.checker.check_model(program.proto())
    got = run(program, {"x": X, "flag": np.array(flag)})[output]
    np.testing.assert_allclose(got, 2 * (np.exp(X) + flag), rtol=1e-6)


def test_a_subgraphs_own_names_give_way_to_outer_ones() -> None:
    trace, _, x = started()
    condition = trace.input("flag", np.bool_, ())
    outer = trace.input("t", np.float32, ("N", 3))
    inner = conditional(trace, condition, outer, "w")
    program = build(trace, {"y": inner + x}, name="p")
    onnx.checker.check_model(program.proto())
    got = run(program, {"x": X, "t": X, "flag": np.array(True)})["y"]
    np.testing.assert_allclose(got, 2 * X + 1)
