"""States of a loop that double in every iteration are not followed while a model is only measured.

The class: a run during the analysis, on small inputs, takes what the model asks for. 500 bytes took 10 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from ortflex_core import Trainer, gradient_model
from ortflex_core.compiler.operators import loop_bounds
from ortflex_core.compiler.operators.equivalence import Runner
from ortflex_core.kernel.errors import GraphError
from tests import children

pytestmark = pytest.mark.once

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
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 3] x, float[3, 3] w) => (float[1, 1] y) '
        f"{{ h = MatMul(x, w) n = Constant <value = int64 {{{iterations}}}> () {body} }}"
    )
    made.graph.input.pop()
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "w"))
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("how", GROWING)
def test_a_state_that_doubles_takes_no_memory_in_the_analysis(how: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parsed(GROWING[how], 40), path)
    assert path.stat().st_size < 600
    done = children.run([sys.executable, "-c", CODE, str(path)], check=True)
    assert int(done.stdout) < 700


@pytest.mark.parametrize("how", GROWING)
def test_the_run_ends_with_the_name_of_the_loop(how: str) -> None:
    with pytest.raises(GraphError, match="a state of more than"):
        Runner(parsed(GROWING[how], 40), {})({"x": np.ones((2, 3), np.float32)})


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


def test_few_doublings_train() -> None:
    model = parsed(GROWING["concat"], 3)
    trainer = Trainer(model, loss="squared_error", progress=False, backend="fused", epochs=1)
    x = np.ones((4, 3), np.float32)
    assert trainer.predict(x).shape == (1, 1)


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


@pytest.mark.parametrize("way", APPENDED)
def test_a_loop_that_appends_one_tensor_an_iteration_has_its_gradient(way: str) -> None:
    """Of any number of iterations, which is known in no file: y = sin(x w), row by row."""
    graph = gradient_model(collecting(*APPENDED[way]), wrt=["w"])
    rng = np.random.default_rng(0)
    for rows in (1, 5):
        x, dy = rng.standard_normal((2, rows, 3))
        w = rng.standard_normal((3, 3))
        session = onnxruntime.InferenceSession(graph.SerializeToString())
        (cotangent,) = [i.name for i in session.get_inputs() if i.name.startswith("cotangent")]
        feeds = {n: a.astype(np.float32) for n, a in (("x", x), ("w", w), (cotangent, dy))}
        found = session.run(["gradient/w"], feeds)[0]
        np.testing.assert_allclose(found, x.T @ (np.cos(x @ w) * dy), rtol=1e-5, atol=1e-6)


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
