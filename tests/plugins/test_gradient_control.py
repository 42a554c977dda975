"""What of control flow is left in a gradient graph, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto

from ortflex_core import GraphError, NoGradientRule, NotDifferentiable, gradient_model, internals_of
from tests import models
from tests.training import make, plugins


def model(body: str, inputs: str = "float[N, 3] x, float[3] w") -> ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "my.company": 1]>
        g ({inputs}) => (float[N, 3] y) {{ {body} }}"""
    )


def operators(source: ModelProto, wrt: str = "w") -> Counter[str]:
    made = gradient_model(source, wrt, plugins=plugins())
    return Counter(node.op_type for node in made.graph.node)


LOOP = """
    y = Loop(n, , x) <body = b (int64 i, bool go, float[] s) => (bool on, float[] t) {
        on = Identity(go)  m = Mul(s, w)  t = %s(m)
    }>
"""
FIVE = "n = Constant <value = int64 {5}> ()"


def test_a_short_loop_is_written_out() -> None:
    found = operators(model(FIVE + LOOP % "Tanh"))
    assert found["Loop"] == 0
    assert found["Tanh"] == 5


def test_a_long_loop_stays_one_and_is_reversed_by_another() -> None:
    found = operators(model("n = Constant <value = int64 {1000}> ()" + LOOP % "Tanh"))
    assert found["Loop"] == 2
    assert found["Tanh"] == 0


@pytest.mark.parametrize("taken", ["Exp", "Tanh"])
def test_a_constant_condition_leaves_its_branch(taken: str) -> None:
    body = f"""
        c = Constant <value = bool {{{int(taken == "Exp")}}}> ()
        y = If(c) <then_branch = t () => (float[] a) {{ m = Mul(x, w)  a = Exp(m) }},
                   else_branch = e () => (float[] b) {{ m = Mul(x, w)  b = Tanh(m) }}>
    """
    found = operators(model(body))
    assert found["If"] == 0
    assert found[taken] == 1
    assert found["Exp"] + found["Tanh"] == 1


def test_what_a_body_only_looks_at_costs_nothing() -> None:
    """Of the state the body's gradient does not depend on no copies are kept."""
    made = gradient_model(
        model(LOOP % "Neg", "int64 n, float[N, 3] x, float[3] w"), "x", plugins=plugins()
    )
    forward = next(n for n in made.graph.node if n.op_type == "Loop")
    assert len(forward.output) == 2  # the state, and a 1 an iteration, which are counted


def test_random_numbers_in_a_body_are_refused() -> None:
    body = FIVE.replace("5", "500") + LOOP % "Tanh"
    noisy = model(body.replace("t = Tanh(m)", "r = RandomNormalLike(m)  t = Add(m, r)"))
    with pytest.raises(
        NoGradientRule, match="operator Loop with the random operator RandomNormalLike in its body"
    ):
        operators(noisy)


def test_an_operator_without_a_rule_inside_a_branch_is_named() -> None:
    body = """
        k = Constant <value = int64 {0}> ()
        first = Gather(x, k)
        zero = Constant <value = float {0}> ()
        sum = ReduceSum <keepdims = 0> (first)
        c = Greater(sum, zero)
        y = If(c) <then_branch = t () => (float[] a) { m = Mul(x, w)  a = my.company.Silu(m) },
                   else_branch = e () => (float[] b) { b = Mul(x, w) }>
    """
    with pytest.raises(NoGradientRule, match=r"operator Silu of my\.company opset 1, node Silu"):
        operators(model(body))


def test_a_wall_in_both_branches_is_a_wall() -> None:
    body = """
        y = If(c) <then_branch = t () => (float[] a) { m = Mul(x, w)  a = Floor(m) },
                   else_branch = e () => (float[] b) { m = Mul(x, w)  b = Ceil(m) }>
    """
    made = gradient_model(model(body, "bool c, float[N, 3] x, float[3] w"), "w", plugins=plugins())
    feeds = {"c": np.array(True), "x": np.ones((2, 3), "f4"), "w": np.ones(3, "f4")}
    got = models.predict(made, feeds | {"cotangent/y": np.ones((2, 3), "f4")})
    np.testing.assert_array_equal(got["gradient/w"], np.zeros(3))


def test_a_condition_on_a_parameter_alone_passes_no_gradient() -> None:
    body = """
        zero = Constant <value = float {0}> ()
        total = ReduceSum <keepdims = 0> (w)
        c = Greater(total, zero)
        y = If(c) <then_branch = t () => (float[] a) { a = Exp(x) },
                   else_branch = e () => (float[] b) { b = Tanh(x) }>
    """
    with pytest.raises(
        NotDifferentiable,
        match=r"no gradient reaches 'w' .* \(If with the bool values of Greater\)",
    ):
        operators(model(body))


@pytest.mark.backend("fused")
def test_a_network_with_a_scan_trains() -> None:
    """A recurrent layer as a Scan over a time that is not known before it runs."""
    source = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[N, T, 2] x) => (float[N, 1] y) {
            first = Transpose <perm = [1, 0, 2]> (x)
            shape = Shape(x)
            zero = Constant <value = int64 {0}> ()
            rows = Gather <axis = 0> (shape, zero)
            width = Constant <value = int64[1] {4}> ()
            place = Constant <value = int64[1] {0}> ()
            many = Unsqueeze(rows, place)
            start_shape = Concat <axis = 0> (many, width)
            start = ConstantOfShape(start_shape)
            last, every = Scan <body = b (float[] s, float[] now) => (float[] t, float[] out) {
                p = MatMul(now, w_in)
                q = MatMul(s, w_state)
                sum = Add(p, q)
                t = Tanh(sum)
                out = Identity(t)
            }, num_scan_inputs = 1> (start, first)
            y = MatMul(last, w_out)
        }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("w_in", (2, 4)), ("w_state", (4, 4)), ("w_out", (4, 1))):
        value = (rng.standard_normal(shape) / 2).astype(np.float32)
        source.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    x = rng.standard_normal((64, 6, 2)).astype(np.float32)
    y = x[:, -1, :1] - 0.5 * x[:, -2, :1]
    options: dict[str, Any] = {"backend": "fused", "batch_size": 16, "epochs": 12}
    trainer = make(source, optimizer="adam", learning_rate=0.02, **options)
    trainer.fit(x, y)
    assert set(internals_of(trainer).problem.parameters) == {"w_in", "w_state", "w_out"}
    assert trainer.train_losses_[-1] < 0.3 * trainer.train_losses_[0]


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("chunk", [1, 3])
def test_part_of_a_tensor_of_unknown_size(size: int, chunk: int) -> None:
    """Every position, and those just outside: the run fails there, as SequenceAt does."""
    body = f"""k = Constant <value = int64 {{{chunk}}}> ()
        parts = SplitToSequence <axis = 0> (x, k)  a = SequenceAt(parts, p)  y = Mul(a, a)"""
    proto = gradient_model(model(body, "float[N, 3] x, int64 p"), "x", plugins=plugins())
    x = np.arange(1, 1 + 3 * size, dtype=np.float32).reshape(size, 3)
    parts = np.split(np.arange(size), range(chunk, size, chunk))
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for place in range(-len(parts) - 1, len(parts) + 1):
        feeds = {"x": x, "p": np.array(place)}
        if not -len(parts) <= place < len(parts):
            feeds["cotangent/y"] = np.ones((1, 3), np.float32)
            with pytest.raises(Exception, match=r"(?i)out of|bounds|range"):
                session.run(["gradient/x"], feeds)
            continue
        feeds["cotangent/y"] = np.ones_like(x[parts[place]])
        expected = np.zeros_like(x)
        expected[parts[place]] = 2 * x[parts[place]]
        np.testing.assert_array_equal(session.run(["gradient/x"], feeds)[0], expected)


@pytest.mark.parametrize("count", [0, 3, 200])
def test_list_that_grows_in_a_loop_of_known_count(count: int) -> None:
    """0 iterations leave the list as it is; many are written out, for there is no other way."""
    body = f"""n = Constant <value = int64 {{{count}}}> ()  first = SequenceConstruct(w)
        list = Loop(n, , first) <
            body = b (int64 i, bool go, seq(float[]) l) => (bool on, seq(float[]) m) {{
                on = Identity(go)  t = Gather(x, i)  s = Mul(t, t)  m = SequenceInsert(l, s)
            }}
        > y = ConcatFromSequence <axis = 0, new_axis = 1> (list)"""
    proto = gradient_model(model(body), "x" if count else "w", plugins=plugins())
    x = np.random.default_rng(0).standard_normal((200, 3)).astype(np.float32)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    g = np.random.default_rng(1).standard_normal((count + 1, 3)).astype(np.float32)
    feeds = {"x": x, "w": np.ones(3, np.float32), "cotangent/y": g}
    (found,) = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})[1:]
    expected = np.zeros_like(x)
    expected[:count] = 2 * x[:count] * g[1:]
    np.testing.assert_allclose(found, expected if count else g[0], rtol=1e-6)


def test_list_in_a_loop_of_unknown_count_is_refused() -> None:
    body = """one = Constant <value = int64 {1}> ()  parts = SplitToSequence <axis = 0> (x, one)
        n = SequenceLength(parts)
        y = Loop(n, , x) <
            body = b (int64 i, bool go, float[N, 3] s) => (bool on, float[N, 3] t) {
                on = Identity(go)  e = SequenceAt(parts, i)  t = Mul(s, e)
            }
        >"""
    with pytest.raises(GraphError, match="number of iterations"):
        gradient_model(model(body), "x", plugins=plugins())
