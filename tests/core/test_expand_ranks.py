"""Shapes that a graph computes: the class "the rank is lost, or a branch that is not taken decides".

The length of the sizes given to Expand is the rank of its result, whatever their values are, and what
cannot be computed in a branch that is not taken is no error.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ortflex
from ortflex_core import Trace


@pytest.mark.parametrize(
    ("shape", "length", "expected"),
    [
        ((2, 3), 3, (None, 2, 3)),
        ((1, 3), 2, (None, 3)),
        ((4, 1, 3), 1, (4, 1, 3)),
        ((4, 1, 3), 2, (4, None, 3)),
        ((), 2, (None, None)),
        (("N", 3), 2, (None, 3)),
        ((2, 3), None, None),
    ],
)
def test_the_number_of_sizes_decides_the_rank(
    shape: tuple[int | str, ...], length: int | None, expected: tuple[int | None, ...] | None
) -> None:
    trace = Trace({"": 20})
    x = trace.input("x", onnx.TensorProto.FLOAT, shape)
    sizes = trace.input("sizes", onnx.TensorProto.INT64, (length,))
    assert trace.op.Expand(x, sizes).shape == expected


EXPANDED = """
<ir_version: 9, opset_import: ["": 20]>
g (float[2, 3] x, int64[3] sizes, float[3, 4] w) => (float y) {
    wide = Expand(x, sizes)
    product = MatMul(wide, w)
    square = Mul(product, product)
    y = ReduceSum<keepdims = 0>(square)
}
"""


def test_the_gradient_of_a_product_of_an_expanded_tensor() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3)), rng.normal(size=(3, 4))
    made = ortflex.gradient_model(onnx.parser.parse_model(EXPANDED), ["x", "w"])
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {"x": x.astype("f"), "w": w.astype("f"), "sizes": np.array([5, 2, 3])}
    feeds = {i.name: given.get(i.name, np.ones((), "f")) for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    got = dict(zip(names, session.run(names, feeds), strict=True))
    right = {"x": 10 * x @ w @ w.T, "w": 10 * x.T @ x @ w}
    for name, value in right.items():
        (found,) = [v for n, v in got.items() if n != "y" and v.shape == value.shape]
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-4, err_msg=name)


BRANCHES = """
<ir_version: 9, opset_import: ["": 20]>
g (float[2, 3] x, int64[5] sizes) => (float[2, 3] y) {
    count = Size(sizes)
    four = Constant<value_int = 4>()
    short = Equal(count, four)
    last = If(short) <
        then_branch = t () => (int64[q] d) { a, b, c, d = Split<num_outputs = 4>(sizes) },
        else_branch = e () => (int64[r] h) { e, f, g, h, i = Split<num_outputs = 5>(sizes) }
    >
    factor = CastLike(last, x)
    y = Mul(x, factor)
}
"""


def test_a_branch_that_is_not_taken_may_have_a_size_that_onnx_infers_as_negative() -> None:
    made = ortflex.gradient_model(onnx.parser.parse_model(BRANCHES), ["x"])
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {"x": np.ones((2, 3), "f"), "sizes": np.array([1, 2, 3, 7, 5])}
    feeds = {i.name: given.get(i.name, np.ones((2, 3), "f")) for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    for name, value in zip(names, session.run(names, feeds), strict=True):
        np.testing.assert_array_equal(value, np.full((2, 3), 7, "f"), err_msg=name)
