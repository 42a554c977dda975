"""Rows that are masked everywhere: 0/0, which a Where after it drops.

The class of defects: a value that is no number, and that the model does not use, makes gradients that
are no numbers. It is what scaled dot product attention with padding masks exports to.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx.defs import onnx_opset_version

from ortflex_core import gradient_model
from ortflex_core.compiler.operators.equivalence import Runner

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
