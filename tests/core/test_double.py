"""The float64 twin of a model is well typed, and computes what the model does.

The class: an operator gives float32 by default (a default type, a fixed one), or reads it, and
its neighbors are float64 by then.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from ortflex_core import GraphError, compare, internals_of, step_program
from ortflex_core.tools import comparison
from ortflex_core.tools.double_precision import widened, widened_model
from tests import models
from tests.training import make, regression

X = np.random.default_rng(3).standard_normal((2, 3)).astype(np.float32)
SIZED = "r = Reshape(x, four)  u = Resize(r, , s)  y = Reshape(u, back)"
"""Resize reads its scales in float32, whatever they come from."""
DEFAULTS = {
    "constant of shape without a value": "s = Shape(x)  z = ConstantOfShape(s)  y = Sub(x, z)",
    "constant of shape": "s = Shape(x)  z = ConstantOfShape<value = float[1] {2}>(s)  y = Sub(x, z)",
    "cast": "k = Greater(x, x)  z = Cast<to = 1>(k)  y = Sub(x, z)",
    "cast to a like": "k = Greater(x, x)  z = CastLike(k, x)  y = Sub(x, z)",
    "a number": "z = Constant<value_float = 0.5>()  y = Sub(x, z)",
    "numbers": "z = Constant<value_floats = [0.5, 1.5, 2.5]>()  y = Sub(x, z)",
    "a tensor": "z = Constant<value = float[3] {1, 2, 3}>()  y = Sub(x, z)",
    "a mask": "k = Greater(x, w)  y = Where(k, x, w)",
    "a matrix of ones": "t = Expand(w, square)  e = EyeLike<dtype = 1>(t)  y = MatMul(x, e)",
    "a window": "z = HannWindow(three)  y = Sub(x, z)",
    "a size": "r = Reshape(x, four)  u = Resize(r, , scale)  y = Reshape(u, back)",
    "a branch": (
        "k = Constant<value = bool {1}>()  y = If(k) <then_branch = a () => (float[N, 3] p) "
        "{ s = Shape(x)  z = ConstantOfShape(s)  p = Add(x, z) }, "
        "else_branch = b () => (float[N, 3] q) { q = Neg(x) }>"
    ),
    "a whole number": "k = Constant<value_int = 2>()  z = Cast<to = 1>(k)  y = Sub(x, z)",
    "whole numbers": "k = Constant<value_ints = [1, 2, 3]>()  z = CastLike(k, x)  y = Sub(x, z)",
    "a loop": (
        "t = Constant<value_int = 3>()  k = Constant<value = bool {1}>()  s, all = Loop(t, k, x) "
        "<body = b (int64 i, bool c, float[N, 3] a) "
        "=> (bool d, float[N, 3] e, float[N, 3] f) { d = Identity(c)  e = Mul(a, w)  f = Neg(e) }>  "
        "m = ReduceSum<keepdims = 0>(all, first)  y = Add(s, m)"
    ),
    **{
        f"a size from {what}": f"{text}  {SIZED}"
        for what, text in {
            "the first state of a loop": (
                "t = Constant<value_int = 2>()  k = Constant<value = bool {1}>()  "
                "s, v, l = Loop(t, k, scale, x) <body = b "
                "(int64 i, bool c, float[4] a, float[N, 3] p) => "
                "(bool d, float[4] e, float[N, 3] q, float h) "
                "{ d = Identity(c)  e = Abs(a)  q = Neg(p)  h = ReduceMax<keepdims = 0>(e) }>"
            ),
            "what a loop collects": (
                "t = Constant<value_int = 4>()  k = Constant<value = bool {1}>()  "
                "v, w1 = Loop(t, k, x) <body = b (int64 i, bool c, float[N, 3] p) => "
                "(bool d, float[N, 3] q, float h) "
                "{ d = Identity(c)  q = Neg(p)  h = Constant<value_float = 1.0>() }>  s = Reshape(w1, flat)"
            ),
            "a scan": (
                "v, s = Scan<num_scan_inputs = 1, body = b (float[N, 3] p, float a) => "
                "(float[N, 3] q, float e) { q = Neg(p)  e = Abs(a) }>(x, scale)"
            ),
            "a branch": (
                "k = Constant<value = bool {1}>()  "
                "v, s = If(k) <then_branch = a () => (int64 i, float[4] p) "
                "{ i = Constant<value_int = 2>()  p = Abs(scale) }, "
                "else_branch = b () => (int64 j, float[4] q) "
                "{ j = Constant<value_int = 3>()  q = Neg(scale) }>"
            ),
        }.items()
    },
    "a norm of a declared type": (
        "z, m, v = LayerNormalization<stash_type = 1>(x, one)  u = Sub(x, m)  y = Mul(u, v)"
    ),
    "a norm": "z, m, v = LayerNormalization(x, one)  u = Sub(x, m)  y = Add(u, z)",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_float64_twin_is_typed_and_computes_the_same(name: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> g (float[N, 3] x) => (float[N, 3] y)
        <float[3] w = {{0.1, 0.2, 0.3}}, int64[2] square = {{3, 3}}, int64 three = {{3}},
         int64[4] four = {{1, 1, -1, 3}}, int64[2] back = {{-1, 3}}, float[4] scale = {{1, 1, 1, 1}},
         float[3] one = {{1, 1, 1}}, int64[1] first = {{0}},
         int64[1] flat = {{4}}> {{ {DEFAULTS[name]} }}"""
    )
    onnx.checker.check_model(model, full_check=True)
    twin = widened_model(model)
    onnx.checker.check_model(twin, full_check=True)
    found = [
        ReferenceEvaluator(proto).run(["y"], {"x": x})[0]
        for proto, x in ((model, X), (twin, X.astype(np.float64)))
    ]
    assert found[1].dtype == np.float64
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_a_widened_program_says_what_it_takes_and_gives() -> None:
    """The specs of inputs, host scalars and outputs are the types of its graph."""
    model = models.parsed(  # the first node gives float32
        "z = ConstantOfShape(three)  d = Sub(x, z)  y = MatMul(d, w)",
        {"w": np.ones((3, 1)), "three": np.array([3])},
        "float[N, 3] x",
        "float[N, 1] y",
    )
    trainer = make(model)
    trainer.step(regression(rows=4, features=3))
    program = step_program(internals_of(trainer).problem)
    twin = widened(program)
    graph = twin.proto().graph
    given = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    hosts = [h.spec for h in twin.hosts]
    specs = [*twin.inputs, *hosts, *twin.outputs]
    assert {s.name: s.dtype for s in specs} == given
    assert {s.dtype for s in specs} == {onnx.TensorProto.DOUBLE}
    assert [s.name for s in specs] == [
        s.name for s in (*program.inputs, *(h.spec for h in program.hosts), *program.outputs)
    ]
    assert twin.nodes == len(graph.node)
    assert "float64" in twin.name
    assert [h.expression for h in twin.hosts] == [h.expression for h in program.hosts]
    assert widened(program).key == twin.key


def test_a_backend_compared_with_itself_is_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a float64 reference the first backend is one, and nothing is said of it."""
    refused = mock.Mock(side_effect=GraphError("no kernel"))
    monkeypatch.setattr(comparison, "Double", refused)
    x, y = regression(rows=20)
    found = compare(make(models.linear()), x, y, steps=2, backends=["fused"])
    assert found.reference == "fused"
    assert not found.agree
    assert any("only fused can train this problem" in note for note in found.notes)
    both = compare(make(models.linear()), x, y, steps=2, backends=["fused", "example_numpy"])
    assert both.agree
