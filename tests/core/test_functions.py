"""Functions of a model whose opset is another than the model's: inlined, computing the same.

The class: onnx's inliner leaves such calls without an error, and what follows (inference, the runtime,
gradients) does not know them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Model, ModelError
from tests.training import make

X = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)

SAME = "h = Abs (a)  y = Add (h, a)"
"""Operators that mean the same in all opsets used here."""
NESTED = "h = inner (a)  y = Add (h, a)"


def model(body: str, opset: int, function: int, inner: str = "y = Neg (a)") -> onnx.ModelProto:
    imports = f'"": {function}, "local": 1'
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {opset}, "local": 1]>
        g (float[N, 3] x) => (float[N, 3] out)
        <float[3, 3] w = {{1, 0, 0.5, 0, 1, 0, 0.25, 0, 1}}>
        {{ p = MatMul (x, w)  out = local.called (p) }}
        <domain: "local", opset_import: [{imports}]> called (a) => (y)
        {{ {body.replace("inner", "local.inner")} }}
        <domain: "local", opset_import: [{imports}]> inner (a) => (y) {{ {inner} }}"""
    )


def expected(body: str) -> Any:
    p = X @ np.array([[1, 0, 0.5], [0, 1, 0], [0.25, 0, 1]], np.float32)
    return abs(p) + p if body == SAME else p - p


@pytest.mark.parametrize(
    ("body", "opset", "function"),
    [(SAME, 17, 17), (SAME, 17, 15), (SAME, 18, 13), (NESTED, 21, 13)],
)
def test_functions_of_another_opset_are_inlined(body: str, opset: int, function: int) -> None:
    proto = model(body, opset, function)
    source = Model(proto)
    assert not source.internal.functions
    assert {n.domain for n in source.internal.graph.node} <= {"", "ai.onnx"}
    trainer = make(proto, backend="fused", epochs=2, learning_rate=0.01)
    np.testing.assert_allclose(trainer.predict(X), expected(body), rtol=1e-5, atol=1e-5)
    trainer.fit(X, np.ones_like(X))
    assert np.isfinite(trainer.train_losses_).all()
    if body != NESTED:
        assert trainer.train_losses_[-1] < trainer.train_losses_[0]


def test_a_function_whose_operators_mean_something_else_is_refused() -> None:
    """The axes of ReduceSum are an attribute until opset 12, an input from 13 on."""
    body = "h = ReduceSum <axes=[1], keepdims=1> (a)  y = Mul (h, a)"
    with pytest.raises(ModelError, match=r"ReduceSum.*not compatible"):
        Model(model(body, 17, 11))
