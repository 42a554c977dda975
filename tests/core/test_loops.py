"""Loops of a file end: by themselves, as before, or with an error that names them.

The class: any Loop whose number of iterations the file does not bound, however its condition is
written (absent, empty, constant, handed through, computed and always true) and wherever the loop is
(in a function, a branch, a Scan, another loop).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from ortflex_core import DataError, GraphError, Model
from ortflex_core.compiler.operators import loop_bounds
from tests import models
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
    """A run of the model fails, and names the loop."""
    trainer = make(model, backend="fused", epochs=1)
    with pytest.raises((GraphError, DataError), match=r"more than \d+ iterations of the Loop"):
        trainer.predict(X)


@pytest.mark.parametrize("around", ["y = {}", IN_BRANCH, IN_SCAN, IN_LOOP])
@pytest.mark.parametrize("body", [SAME, TRUE])
@pytest.mark.parametrize(("count", "condition"), [("", ""), ("", "yes"), ("many", "")])
def test_endless_loops_fail_with_their_name(
    count: str, condition: str, body: str, around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("around", ["y = {}", IN_BRANCH, IN_SCAN, IN_LOOP])
def test_loops_whose_condition_is_always_true_fail_with_their_name(
    around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The condition is computed, so only a run can tell; a smaller bound makes the test fast."""
    monkeypatch.setattr(loop_bounds, "MOST_ITERATIONS", 10_000)
    trainer = make(loop("many", "yes", ALWAYS, around), backend="fused", epochs=1)
    for call in (lambda: trainer.predict(X), lambda: trainer.fit(X, X)):
        with pytest.raises((GraphError, ValueError), match=r"more than \d+ iterations of the Loop"):
            call()


def test_bounds_are_reached_at_once_in_loops_inside_one_another(monkeypatch: Any) -> None:
    """The iterations of loops inside one another multiply; so do their bounds."""
    monkeypatch.setattr(loop_bounds, "MOST_ITERATIONS", 10_000)
    outer = IN_LOOP.replace("rows", "many").replace("oo = Identity(og)", "oo = Greater(most, most)")
    bodies = [n.attribute[0].g for n in Model(loop("many", "", HALVES, outer)).internal.graph.node
              if n.op_type == "Loop"]  # fmt: skip
    inner = next(n.attribute[0].g for n in bodies[0].node if n.op_type == "Loop")
    tensors = [t for body in (bodies[0], inner) for t in body.initializer]
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
