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
TIMES = "n = Constant <value = int64 {%d}> ()"
NOISY = LOOP.replace("t = %s(m)", "r = RandomNormalLike(m)  t = Add(m, r)")
SUM = "zero = Constant <value = float {0}> ()  sum = ReduceSum <keepdims = 0> (%s)"


@pytest.mark.parametrize(("count", "loops", "written"), [(5, 0, 5), (1000, 2, 0)])
def test_a_short_loop_is_written_out_and_a_long_one_reversed_by_another(
    count: int, loops: int, written: int
) -> None:
    found = operators(model(TIMES % count + LOOP % "Tanh"))
    assert (found["Loop"], found["Tanh"]) == (loops, written)


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


REFUSED: dict[str, tuple[str, type[Exception], str]] = {
    "random numbers in a body": (
        TIMES % 500 + NOISY,
        NoGradientRule,
        "operator Loop with the random operator RandomNormalLike in its body",
    ),
    "an operator without a rule inside a branch": (
        f"""k = Constant <value = int64 {{0}}> ()  first = Gather(x, k)  {SUM % "first"}
        c = Greater(sum, zero)
        y = If(c) <then_branch = t () => (float[] a) {{ m = Mul(x, w)  a = my.company.Silu(m) }},
                   else_branch = e () => (float[] b) {{ b = Mul(x, w) }}>""",
        NoGradientRule,
        r"operator Silu of my\.company opset 1, node Silu",
    ),
    "a condition on a parameter alone": (
        f"""{SUM % "w"}  c = Greater(sum, zero)
        y = If(c) <then_branch = t () => (float[] a) {{ a = Exp(x) }},
                   else_branch = e () => (float[] b) {{ b = Tanh(x) }}>""",
        NotDifferentiable,
        r"no gradient reaches 'w' .* \(If with the bool values of Greater\)",
    ),
    "a list in a loop of unknown count": (
        """one = Constant <value = int64 {1}> ()  parts = SplitToSequence <axis = 0> (x, one)
        n = SequenceLength(parts)
        y = Loop(n, , x) <
            body = b (int64 i, bool go, float[N, 3] s) => (bool on, float[N, 3] t) {
                on = Identity(go)  e = SequenceAt(parts, i)  u = Mul(s, e)  t = Mul(u, w)
            }
        >""",
        GraphError,
        "number of iterations",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradient_is_refused_with_the_reason(name: str) -> None:
    body, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
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


@pytest.mark.backend("fused")
def test_a_network_with_a_scan_trains() -> None:
    """A recurrent layer as a Scan over a time that is not known before it runs."""
    source = models.of_text(
        """(float[N, T, 2] x) => (float[N, 1] y) {
            first = Transpose <perm = [1, 0, 2]> (x)
            shape = Shape(x)
            zero = Constant <value = int64 {0}> ()  place = Constant <value = int64[1] {0}> ()
            rows = Gather <axis = 0> (shape, zero)  many = Unsqueeze(rows, place)
            width = Constant <value = int64[1] {4}> ()
            start_shape = Concat <axis = 0> (many, width)  start = ConstantOfShape(start_shape)
            last, every = Scan <body = b (float[] s, float[] now) => (float[] t, float[] out) {
                p = MatMul(now, w_in)  q = MatMul(s, w_state)
                sum = Add(p, q)  t = Tanh(sum)  out = Identity(t)
            }, num_scan_inputs = 1> (start, first)
            y = MatMul(last, w_out)
        }""",
        {"w_in": (2, 4), "w_state": (4, 4), "w_out": (4, 1)},
    )
    rng = np.random.default_rng(0)
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
    for place in range(-len(parts) - 1, len(parts) + 1):
        feeds = {"x": x, "p": np.array(place)}
        if not -len(parts) <= place < len(parts):
            feeds["cotangent/y"] = np.ones((1, 3), np.float32)
            with pytest.raises(Exception, match=r"(?i)out of|bounds|range"):
                models.predict(proto, feeds)
            continue
        feeds["cotangent/y"] = np.ones_like(x[parts[place]])
        expected = np.zeros_like(x)
        expected[parts[place]] = 2 * x[parts[place]]
        np.testing.assert_array_equal(models.predict(proto, feeds)["gradient/x"], expected)


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
