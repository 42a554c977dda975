"""Gradient graphs: what of control flow is left, what is refused, and rows that are masked everywhere.

The class of defects of masks: a value that is no number (0/0, which a Where after it drops), and that the
model does not use, makes gradients that are no numbers. It is what scaled dot product attention with
padding masks exports to.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto
from onnx.defs import onnx_opset_version

from ortflex_core import GraphError, NoGradientRule, NotDifferentiable, gradient_model, internals_of
from ortflex_core.compiler.operators.equivalence import Runner
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
    g = np.random.default_rng(1).standard_normal((count + 1, 3)).astype(np.float32)
    feeds = {"x": x, "w": np.ones(3, np.float32), "cotangent/y": g}
    *_, found = models.predict(proto, {i.name: feeds[i.name] for i in proto.graph.input}).values()
    expected = np.zeros_like(x)
    expected[:count] = 2 * x[:count] * g[1:]
    np.testing.assert_allclose(found, expected if count else g[0], rtol=1e-6)


MASK = np.array([[0, -np.inf, 0, 0], [-np.inf] * 4, [0.5, 0, -np.inf, 1]])


def gradient(text: str, opset: int = 17) -> tuple[Any, Any, list[str]]:
    """The gradient by the scores, the cotangent, and the operators of the gradient model."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float[3, 4] x, float[3, 4] m) => '
        f"(float[A, B] y) <float zero = {{0}}, float one = {{1}}> {{ {text} }}"
    )
    proto = gradient_model(model, "x")
    rng = np.random.default_rng(0)
    rows = 1 if "keepdims" in text else 4
    x, g = rng.standard_normal((3, 4)), rng.standard_normal((3, rows))
    feeds = {"x": x, "m": MASK, "cotangent/y": g}
    out = Runner(proto, {})({n: a.astype(np.float32) for n, a in feeds.items()})["gradient/x"]
    p = np.exp(x + MASK)
    total = p.sum(1, keepdims=True)
    p = p / np.where(total > 0, total, 1)
    return out, (g, p), [node.op_type for node in proto.graph.node]


@pytest.mark.parametrize(
    "drop",
    [
        "n = IsNaN(s) y = Where(n, zero, s)",
        "h = ReduceMax<axes=[1]>(z) b = IsInf(h) y = Where(b, zero, s)",
        "c = Cast<to=11>(s) n = IsNaN(c) d = Cast<to=11>(zero) w = Where(n, d, c) y = Cast<to=1>(w)",
        "t = Transpose(s) n = IsNaN(t) w = Where(n, zero, t) y = Transpose(w)",
    ],
)
def test_softmax_of_a_masked_row_passes_nothing(drop: str) -> None:
    got, (g, p), _ = gradient(f"z = Add(x, m) s = Softmax<axis=1>(z) {drop}")
    np.testing.assert_allclose(got, p * (g - (g * p).sum(1, keepdims=True)), atol=1e-6)


def test_log_softmax_of_a_masked_row_passes_nothing() -> None:
    text = "z = Add(x, m) s = LogSoftmax<axis=1>(z) n = IsNaN(s) y = Where(n, zero, s)"
    got, (g, p), _ = gradient(text)
    g = g * (p.sum(1, keepdims=True) > 0)
    np.testing.assert_allclose(got, g - p * g.sum(1, keepdims=True), atol=1e-6)


def test_the_logarithm_of_a_sum_of_nothing_passes_nothing() -> None:
    text = "z = Add(x, m) y = ReduceLogSumExp<axes=[1], keepdims=1>(z)"
    got, (g, p), _ = gradient(text)
    np.testing.assert_allclose(got, g * p, atol=1e-6)


def test_rows_that_are_not_dropped_cost_nothing_more() -> None:
    _, _, operators = gradient("z = Add(x, m) y = Softmax<axis=1>(z)")
    assert not {"IsNaN", "Where"} & set(operators)


@pytest.mark.parametrize(
    "fmod",
    [1, pytest.param(0, marks=pytest.mark.skipif(onnx_opset_version() < 28, reason="onnx < 1.23"))],
)
@pytest.mark.parametrize("x", [np.inf, -np.inf, np.nan])
def test_a_dropped_remainder_leaves_the_shared_divisor_its_gradient(x: float, fmod: int) -> None:
    """x mod y by y is −⌊x / y⌋, or toward zero with fmod; the element without one adds nothing."""
    # Floats are taken without fmod from opset 28 on.
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {17 if fmod else 28}]> '
        "g (float[4] x, float[1] y, bool[4] keep) => (float[4] z) <float zero = {0}> "
        f"{{ m = Mod<fmod={fmod}>(x, y) z = Where(keep, m, zero) }}"
    )
    feeds = {"x": [x, 5.5, -4.5, np.nan], "y": [2], "cotangent/z": [1, 2, 3, 4]}
    given = {n: np.array(a, np.float32) for n, a in feeds.items()}
    given["keep"] = np.array([False, True, True, False])
    found = Runner(gradient_model(model, ["x", "y"]), {})(given)
    toward = [2, -2] if fmod else [2, -3]
    np.testing.assert_allclose(found["gradient/y"], [-np.dot([2, 3], toward)], rtol=1e-6)
    np.testing.assert_allclose(found["gradient/x"], [0, 2, 3, 0])


@pytest.mark.parametrize("side", [8, 128, 129])
@pytest.mark.parametrize("bounds", ["lo, hi", "lo", ", hi"])
def test_clip_passes_nothing_outside_of_its_bounds(side: int, bounds: str) -> None:
    """Not even an infinity, which the root of a clipped 0 gives; inside an infinity stays one."""
    text = (
        f'<ir_version: 8, opset_import: ["": 17]> g (float[{side}, {side}] x) => (float[A, B] y) '
        f"<float lo = {{-0.5}}, float hi = {{0.75}}> {{ y = Clip(x, {bounds}) }}"
    )
    proto = gradient_model(onnx.parser.parse_model(text), "x")
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((side, side)).astype(np.float32) for _ in range(2))
    inside = (x >= (-0.5 if "lo" in bounds else -9)) & (x <= (0.75 if "hi" in bounds else 9))
    for value, where in itertools.product((np.inf, -np.inf), (~inside, inside)):
        g.flat[rng.choice(np.flatnonzero(where))] = value
    out = Runner(proto, {})({"x": x, "cotangent/y": g})["gradient/x"]
    np.testing.assert_array_equal(out, np.where(inside, g, 0))


@pytest.mark.parametrize(
    ("then", "product"),
    [
        ("y = Mul(c, w)", False),
        ("h = Mul(c, w) y = Reshape(h, n)", False),
        ("t = Transpose(c) h = Mul(t, w) y = Reshape(h, n)", False),
        ("y = MatMul(c, w)", True),
        ("r = Reshape(c, m) t = Transpose(r) y = MatMul(t, w)", True),
    ],
)
def test_only_after_a_product_the_mask_is_a_factor(then: str, product: bool) -> None:
    """A factor of 0 is fast, and wrong for a single infinity; sums of products have no single ones."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[128, 128] x, float[128, 128] w)
        => (float[A, B] y) <float lo = {{-0.5}}, float hi = {{0.75}}, int64[2] n = {{64, 256}},
        int64[2] m = {{128, 128}}> {{ c = Clip(x, lo, hi) {then} }}"""
    )
    proto = gradient_model(model, "x")
    x, w = np.random.default_rng(2).standard_normal((2, 128, 128)).astype(np.float32)
    g = np.ones((64, 256) if "n)" in then else (128, 128), np.float32)
    inside = (x >= -0.5) & (x <= 0.75)
    if not product:
        place = np.argwhere(~inside)[0]
        w[tuple(place[::-1] if "Transpose" in then else place)] = np.inf
    feeds = {"x": x, "w": w, "cotangent/y": g}
    out = Runner(proto, {})(feeds)["gradient/x"]
    slope = g @ w.T if product else (w.T if "Transpose" in then else w)
    slope = slope.T if product and "Transpose" in then else slope
    np.testing.assert_allclose(out, np.where(inside, slope, 0), rtol=1e-4, atol=1e-4)
    operators = {node.op_type for node in proto.graph.node}
    assert product != bool(operators & {"Where", "Min"})
