"""States of a loop that double in every iteration are not followed while a model is only measured.

The class: a run during the analysis, on small inputs, takes what the model asks for. 500 bytes took 10 GB.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex_core import Trainer
from ortflex_core.compiler.onnx_files import loop_bounds
from ortflex_core.compiler.opsets.equivalence import Runner
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
