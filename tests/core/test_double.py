"""The float64 twin of a model is well typed, and computes what the model does.

The class: an operator gives float32 by default (a default type, a fixed one), or reads it, and
its neighbors are float64 by then.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from ortflex_core import compare
from ortflex_core.tools.double_precision import widened_model
from tests import models
from tests.training import make, regression

X = np.random.default_rng(3).standard_normal((2, 3)).astype(np.float32)
DEFAULTS = {
    "constant of shape without a value": "s = Shape(x)  z = ConstantOfShape(s)  y = Sub(x, z)",
    "constant of shape": "s = Shape(x)  z = ConstantOfShape<value = float[1] {2}>(s)  y = Sub(x, z)",
    "cast": "k = Greater(x, x)  z = Cast<to = 1>(k)  y = Sub(x, z)",
    "cast to a like": "k = Greater(x, x)  z = CastLike(k, x)  y = Sub(x, z)",
    "a number": "z = Constant<value_float = 0.5>()  y = Sub(x, z)",
    "numbers": "z = Constant<value_floats = [0.5, 1.5, 2.5]>()  y = Sub(x, z)",
    "a tensor": "z = Constant<value = float[3] {1, 2, 3}>()  y = Sub(x, z)",
    "a mask": "k = Greater(x, w)  y = Where(k, x, w)",
    "a matrix of ones": "t = Reshape(w, n)  e = EyeLike<dtype = 1>(t)  y = MatMul(x, e)",
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
    "a norm of a declared type": (
        "z, m, v = LayerNormalization<stash_type = 1>(x, one)  u = Sub(x, m)  y = Mul(u, v)"
    ),
    "a norm": "z, m, v = LayerNormalization(x, one)  u = Sub(x, m)  y = Add(u, z)",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_float64_twin_is_typed_and_computes_the_same(name: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> g (float[N, 3] x) => (float[N, 3] y)
        <float[3] w = {{0.1, 0.2, 0.3}}, int64[2] n = {{1, 3}}, int64 three = {{3}},
         int64[4] four = {{1, 1, -1, 3}}, int64[2] back = {{-1, 3}}, float[4] scale = {{1, 1, 1, 1}},
         float[3] one = {{1, 1, 1}}, int64[1] first = {{0}}> {{ {DEFAULTS[name]} }}"""
    )
    if name == "a matrix of ones":
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "m")
        )
        model.graph.node[0].input[0], model.graph.node[0].input[1] = "m", "square"
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3, 3]), "square"))
    onnx.checker.check_model(model, full_check=True)
    twin = widened_model(model)
    onnx.checker.check_model(twin, full_check=True)
    found = [
        ReferenceEvaluator(proto).run(["y"], {"x": x})[0]
        for proto, x in ((model, X), (twin, X.astype(np.float64)))
    ]
    assert found[1].dtype == np.float64
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_a_backend_compared_with_itself_is_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a float64 reference the first backend is one, and nothing is said of it."""
    from ortflex_core import GraphError
    from ortflex_core.tools import comparison as module

    def refused(*args: object) -> None:
        raise GraphError("no kernel")

    monkeypatch.setattr(module, "Double", refused)
    x, y = regression(rows=20)
    found = compare(make(models.linear()), x, y, steps=2, backends=["fused"])
    assert found.reference == "fused"
    assert not found.agree
    assert any("only fused can train this problem" in note for note in found.notes)
    both = compare(make(models.linear()), x, y, steps=2, backends=["fused", "example_numpy"])
    assert both.agree
