"""Loops of a file end: by themselves, as before, or with an error that names them.

The classes: any Loop whose number of iterations the file does not bound, however its condition is
written (absent, empty, constant, handed through, computed and always true) and wherever the loop is
(in a function, a branch, a Scan, another loop); and a state that doubles in every iteration while a
model is only measured, on small inputs: 500 bytes took 10 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from ortflex_core import DataError, GraphError, Model, gradient_model
from ortflex_core.compiler.operators import loop_bounds
from ortflex_core.compiler.operators.equivalence import Runner
from tests import children, models
from tests.training import make

SAME = "on = Identity(go)  t = Tanh(s)"
TRUE = "on = Constant <value = bool {1}> ()  t = Tanh(s)"
ALWAYS = (
    "low = Constant <value = float {-9}> ()  top = ReduceMax <keepdims = 0> (s) "
    "on = Greater(top, low)  t = Tanh(s)"
)
HALVES = (
    "low = Constant <value = float {0.01}> ()  top = ReduceMax <keepdims = 0> (s) "
    "on = Greater(top, low)  half = Constant <value = float {0.5}> ()  t = Mul(s, half)"
)


def loop(count: str, condition: str, body: str, around: str = "y = {}") -> ModelProto:
    """``m = x @ w`` through a loop of the body, which is in whatever is ``around`` it."""
    inner = (
        f"Loop({count}, {condition}, m) <body = b (int64 i, bool go, float[N, 1] s) => "
        f"(bool on, float[N, 1] t) {{ {body} }}>"
    )
    model: ModelProto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[N, 1] x) => (float[N, 1] y)
        <float[1, 1] w = {{2}}, int64 many = {{{2**62}}}, int64 some = {{900}}, bool yes = {{1}}> {{
            m = MatMul(x, w)  shape = Shape(x)  zero = Constant <value = int64 {{0}}> ()
            rows = Gather(shape, zero)  most = ReduceMax <keepdims = 0> (m)
            maybe = Greater(most, most)  {around.replace("{}", inner)} }}"""
    )
    return model


IN_BRANCH = (
    "y = If(maybe) <then_branch = t1 () => (float[N, 1] p) { p = {} }, "
    "else_branch = e1 () => (float[N, 1] q) { q = {} }>"
)
IN_SCAN = (
    "y, scanned = Scan <num_scan_inputs = 1, body = sc (float[N, 1] st, float[1] row) => "
    "(float[N, 1] nx, float[1] out) { nx = {}  out = Identity(row) }> (m, x)"
)
IN_LOOP = (
    "y = Loop(rows, , m) <body = o (int64 j, bool og, float[N, 1] os) => "
    "(bool oo, float[N, 1] ot) { oo = Identity(og)  ot = {} }>"
)
X = np.linspace(0.1, 1, 8, dtype=np.float32)[:, None]


def fails(model: ModelProto) -> None:
    """A run of the model and a training fail, and name the loop."""
    trainer = make(model, backend="fused", epochs=1)
    for call in (lambda: trainer.predict(X), lambda: trainer.fit(X, X)):
        with pytest.raises((GraphError, DataError), match=r"more than \d+ iterations of the Loop"):
            call()


ENDLESS = [(*c, body) for c in (("", ""), ("", "yes"), ("many", "")) for body in (SAME, TRUE)]


@pytest.mark.parametrize("around", ["y = {}", IN_BRANCH, IN_SCAN, IN_LOOP])
@pytest.mark.parametrize(("count", "condition", "body"), [*ENDLESS, ("many", "yes", ALWAYS)])
def test_endless_loops_fail_with_their_name(
    count: str, condition: str, body: str, around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only a run can tell; a smaller bound makes the test fast."""
    monkeypatch.setattr(loop_bounds, "MOST_ITERATIONS", 10_000)
    fails(loop(count, condition, body, around))


def test_loops_in_functions_fail_with_their_name() -> None:
    model = loop("", "", SAME)
    function = onnx.FunctionProto(name="f", domain="f", input=["x", "w"], output=["y"])
    function.node.extend(model.graph.node)
    function.opset_import.extend(model.opset_import)
    del model.graph.node[:]
    model.graph.node.add(op_type="f", domain="f", input=["x", "w"], output=["y"])
    model.opset_import.add(domain="f", version=1)
    model.functions.append(function)
    fails(model)


def test_bounds_are_reached_at_once_in_loops_inside_one_another(monkeypatch: Any) -> None:
    """The iterations of loops inside one another multiply; so do their bounds."""
    monkeypatch.setattr(loop_bounds, "MOST_ITERATIONS", 10_000)
    outer = IN_LOOP.replace("rows", "many").replace("oo = Identity(og)", "oo = Greater(most, most)")
    graph, tensors = Model(loop("many", "", HALVES, outer)).internal.graph, []
    for _ in range(2):
        graph = next(n.attribute[0].g for n in graph.node if n.op_type == "Loop")
        tensors += graph.initializer
    rooms = [onnx.numpy_helper.to_array(t) for t in tensors if t.name.endswith("room")]
    assert rooms == [100, 100]


def _times(values: np.ndarray, count: int) -> np.ndarray:
    for _ in range(count):
        values = np.tanh(values)
    return values


def _halved(values: np.ndarray) -> np.ndarray:
    while True:
        top, values = values.max(), values * 0.5
        if top <= np.float32(0.01):
            return values


@pytest.mark.parametrize(
    ("count", "body", "reference"),
    [
        ("rows", SAME, lambda m: _times(m, 8)),
        ("some", SAME, lambda m: _times(m, 900)),
        ("many", HALVES, _halved),
        ("", HALVES, _halved),
    ],
)
def test_loops_that_end_compute_what_they_did(count: str, body: str, reference: object) -> None:
    """Also at the last iteration that is allowed, and in training."""
    model = loop(count, "", body)
    trainer = make(model, backend="fused", epochs=1, learning_rate=10.0)
    expected = reference(X.astype(np.float64) * 2)  # type: ignore[operator]
    np.testing.assert_allclose(trainer.predict(X), expected, rtol=1e-4)
    before = trainer.get_state()["w"]
    trainer.fit(X, X)
    assert (trainer.get_state()["w"] != before).any()
    assert b"ortflex.bound" not in trainer.export().SerializeToString()


def test_the_last_iteration_of_a_bound_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight iterations pass a bound of eight; nine do not pass."""
    monkeypatch.setattr(loop_bounds, "MOST_ITERATIONS", 8)
    trainer = make(loop("rows", "", SAME), backend="fused", epochs=1)
    assert trainer.predict(X).shape == (8, 1)
    with pytest.raises((GraphError, DataError), match="more than 8 iterations of the Loop"):
        trainer.predict(np.concatenate([X, X[:1]]))


def test_what_is_freed_and_exported_has_no_bounds() -> None:
    first = "five = Constant <value = int64 {5}> ()  on = Less(i, five)  t = Tanh(s)"
    model = loop("many", "", first)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    freed = Model(model, free_batch=True)
    assert b"ortflex.bound" in freed.internal.SerializeToString()
    out = freed.export({}, free_batch=True)
    assert b"ortflex.bound" not in out.SerializeToString()
    onnx.checker.check_model(out)


def test_results_of_all_iterations_are_in_proportion() -> None:
    """As many iterations as are allowed of scalars may not keep as many matrices."""
    body = """
        m = MatMul(x, w)
        y, kept = Loop(n, , m) <body = b (int64 i, bool go, float[N, 1] s) =>
            (bool on, float[N, 1] t, float[1, 4096] k) {
            on = Identity(go)  t = Tanh(s)  size = Constant <value = int64[2] {1, 4096}> ()
            k = ConstantOfShape(size)
        }>
    """
    weights = {"w": np.full((1, 1), 2.0), "n": np.array(90_000)}
    fails(models.parsed(body, weights, "float[N, 1] x", "float[N, 1] y"))


TENSOR = (
    "f = Loop(n, , h) <body = b (int64 i, bool go, float[] t) => (bool on, float[] u) "
    "{{ on = Identity(go) {} }}> y = ReduceMean <keepdims = 1> (f)"
)
SEQUENCE = (
    "s = SequenceConstruct(h) f = Loop(n, , s) <body = b (int64 i, bool go, seq(float[]) t) => "
    "(bool on, seq(float[]) u) {{ on = Identity(go) {} }}> "
    "c = ConcatFromSequence <axis = 1> (f) y = ReduceMean <keepdims = 1> (c)"
)
GROWING = {
    "concat": TENSOR.format("u = Concat <axis = 1> (t, t)"),
    "construct": TENSOR.format("q = SequenceConstruct(t, t) u = ConcatFromSequence <axis = 1> (q)"),
    "insert": SEQUENCE.format("q = ConcatFromSequence <axis = 1> (t) u = SequenceInsert(t, q)"),
}
STAYING = {
    "tensor": TENSOR.format("u = Tanh(t)"),
    "sequence": SEQUENCE.format(
        "k = Constant <value = int64 {0}> () e = SequenceAt(t, k) v = Tanh(e) u = SequenceInsert(t, v)"
    ),
}
CODE = """
import sys
from pathlib import Path
from ortflex import OrtflexError, Trainer
try:
    Trainer(sys.argv[1], loss="squared_error", progress=False)
except OrtflexError:
    pass
status = Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) // 1024)
"""


def parsed(body: str, iterations: int) -> onnx.ModelProto:
    text = f"h = MatMul(x, w) n = Constant <value = int64 {{{iterations}}}> () {body}"
    return models.parsed(text, {"w": np.eye(3)}, "float[N, 3] x", "float[1, 1] y")


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("how", GROWING)
def test_a_state_that_doubles_takes_no_memory_in_the_analysis(how: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parsed(GROWING[how], 40), path)
    assert path.stat().st_size < 600
    done = children.run([sys.executable, "-c", CODE, str(path)], check=True)
    assert int(done.stdout) < 700


@pytest.mark.once
@pytest.mark.parametrize("how", GROWING)
def test_the_run_ends_with_the_name_of_the_loop(how: str) -> None:
    with pytest.raises(GraphError, match="a state of more than"):
        Runner(parsed(GROWING[how], 40), {})({"x": np.ones((2, 3), np.float32)})


@pytest.mark.once
@pytest.mark.parametrize("how", STAYING)
def test_other_loops_run_as_they_are(how: str) -> None:
    """To the bit, and the file's model has no guard."""
    model, x = parsed(STAYING[how], 5), np.float32([[0.5, -1, 2], [3, 0, 0.25]])
    before = model.SerializeToString()
    found = Runner(model, {})({"x": x})["y"]
    assert model.SerializeToString() == before
    values = [x]
    for _ in range(5):
        values.append(np.tanh(values[-1] if how == "tensor" else x))
    wanted = values[-1] if how == "tensor" else np.concatenate(values, axis=1)
    np.testing.assert_allclose(found, wanted.mean(keepdims=True), 1e-5)
    guarded = onnx.ModelProto.FromString(before)
    loop_bounds.limit_growth(guarded)
    assert guarded.SerializeToString() != before


@pytest.mark.once
def test_few_doublings_train() -> None:
    trainer = make(parsed(GROWING["concat"], 3), backend="fused", epochs=1)
    assert trainer.predict(np.ones((4, 3), np.float32)).shape == (1, 1)


COLLECTING = """
<ir_version: 9, opset_import: ["" : 18]>
g (float[N, 3] x, float[3, 3] w) => (float[N, 3] y)
<int64 zero = {0}, int64 one = {1}, int64[1] minus = {-1}, int64[1] first = {0}>
{
    h = MatMul(x, w)
    sizes = Shape(x)
    rows = Gather <axis = 0> (sizes, zero)
    go = Less(zero, rows)
    empty = SequenceEmpty()
    last, parts = Loop("", go, zero, empty) <body = b (int64 i, bool c, int64 k, q)
    => (bool on, int64 n, r) {
        n = Add(k, one)
        begin = Reshape(k, minus)
        end = Reshape(n, minus)
        row = Slice(h, begin, end, first)
        wave = Sin(row)
        PART
        on = Less(n, rows)
    }>
    JOINED
}
"""
APPENDED = {
    "rows": ("r = SequenceInsert(q, wave)", "y = ConcatFromSequence <axis = 0> (parts)"),
    "columns": (
        "turned = Transpose <perm = [1, 0]> (wave) r = SequenceInsert(q, turned)",
        "joined = ConcatFromSequence <axis = 1> (parts) y = Transpose <perm = [1, 0]> (joined)",
    ),
    "stacked": (
        "flat = Reshape(wave, minus) r = SequenceInsert(q, flat)",
        "y = ConcatFromSequence <axis = 0, new_axis = 1> (parts)",
    ),
    "stacked last": (
        "flat = Reshape(wave, minus) r = SequenceInsert(q, flat)",
        "joined = ConcatFromSequence <axis = -1, new_axis = 1> (parts) "
        "y = Transpose <perm = [1, 0]> (joined)",
    ),
}


def collecting(part: str, joined: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(COLLECTING.replace("PART", part).replace("JOINED", joined))


@pytest.mark.once
@pytest.mark.parametrize("way", APPENDED)
def test_a_loop_that_appends_one_tensor_an_iteration_has_its_gradient(way: str) -> None:
    """Of any number of iterations, which is known in no file: y = sin(x w), row by row."""
    graph = gradient_model(collecting(*APPENDED[way]), wrt=["w"])
    rng = np.random.default_rng(0)
    for rows in (1, 5):
        x, dy = rng.standard_normal((2, rows, 3))
        w = rng.standard_normal((3, 3))
        (cotangent,) = [i.name for i in graph.graph.input if i.name.startswith("cotangent")]
        feeds = {n: a.astype(np.float32) for n, a in (("x", x), ("w", w), (cotangent, dy))}
        found = models.predict(graph, feeds)["gradient/w"]
        np.testing.assert_allclose(found, x.T @ (np.cos(x @ w) * dy), rtol=1e-5, atol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize(
    "part",
    [
        "r = SequenceInsert(q, wave, zero)",
        "half = SequenceInsert(q, wave) r = SequenceInsert(half, wave)",
        "r = SequenceInsert(q, wave) length = SequenceLength(q)",
    ],
    ids=["in front", "twice", "length"],
)
def test_a_loop_that_does_more_with_its_sequence_is_refused(part: str) -> None:
    model = collecting(part, APPENDED["rows"][1])
    with pytest.raises(GraphError, match="only appends tensors of one shape"):
        gradient_model(model, wrt=["w"])
