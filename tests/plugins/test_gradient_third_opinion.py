"""Gradients of small graphs against those of onnx-ad, which has rules of its own."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from ortflex_core import Array, gradient_model

onnx_ad = pytest.importorskip("onnx_ad")

# Inputs and what is made of them; float inputs lie in 0.1 … 0.9, away from kinks.
GRAPHS = {
    "layer": (
        "float[5,3] x, float[3,4] w, float[4] b",
        "p = MatMul(x, w) s = Add(p, b) y = Tanh(s)",
    ),
    "gemm": (
        "float[3,5] x, float[4,3] w, float[4] b",
        "y = Gemm<transA = 1, transB = 1, alpha = 0.5, beta = 2.0>(x, w, b)",
    ),
    "broadcast": ("float[2,1,3] x, float[4,1] w", "p = Mul(x, w) q = Div(p, x) y = Sub(q, w)"),
    "square": ("float[4] x", "p = Mul(x, x) y = Add(p, x)"),
    "power": ("float[2,3] x, float[3] w", "y = Pow(x, w)"),
    "logs": ("float[2,3] x", "p = Log(x) q = Sqrt(x) r = Exp(p) s = Add(q, r) y = Reciprocal(s)"),
    "activations": (
        "float[6] x",
        "p = Elu(x) q = Selu(p) r = LeakyRelu(q) s = Softplus(r) t = Softsign(s) y = Erf(t)",
    ),
    "softmax": ("float[3,4] x", "p = Softmax<axis = 0>(x) q = LogSoftmax(x) y = Mul(p, q)"),
    "reductions": (
        "float[3,4,2] x",
        "p = ReduceMean<axes = [1]>(x) q = ReduceSumSquare<axes = [0], keepdims = 1>(x) "
        "r = ReduceLogSumExp<axes = [2], keepdims = 1>(x) s = Add(p, q) t = Squeeze(r, last) "
        "u = ReduceMax<axes = [0], keepdims = 0>(t) v = Unsqueeze(u, last) y = Mul(s, v)",
    ),
    "shapes": (
        "float[2,6] x",
        "p = Transpose(x) q = Reshape(p, three) r = Slice(q, from, to) s = Concat<axis = 0>(r, q) "
        "t = Expand(s, wide) y = Pad(t, pads)",
    ),
    "words": ("float[5,3] x", "p = Gather(x, ids) y = ReduceL2<axes = [1]>(p)"),
    "choices": (
        "float[4,3] x, float[3] w",
        "c = Less(x, w) p = Where(c, x, w) q = Max(x, w) y = Mul(p, q)",
    ),
    "conv": (
        "float[2,3,7,6] x, float[4,3,3,2] w, float[4] b",
        # Other pads on the left than on the right move its gradient by a column (0.3; torch has ours).
        "y = Conv<strides = [2, 1], pads = [1, 1, 1, 1]>(x, w, b)",
    ),
    "pools": (
        "float[1,2,6,6] x",
        "p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) "
        "q = AveragePool<kernel_shape = [2, 2], strides = [1, 1]>(p) r = GlobalAveragePool(q) "
        "y = Mul(q, r)",
    ),
    "layer norm": (
        "float[2,3,4] x, float[4] w, float[4] b",
        "y = LayerNormalization<axis = -1>(x, w, b)",
    ),
    "instance norm": (
        "float[2,3,5] x, float[3] w, float[3] b",
        "y = InstanceNormalization(x, w, b)",
    ),
    "einsum": ("float[2,3,4] x, float[2,4,5] w", 'y = Einsum<equation = "bij,bjk->bki">(x, w)'),
    "attention": (
        "float[2,4,3] x, float[3,3] w",
        "q = MatMul(x, w) t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(q, t) a = Softmax(s) "
        "y = MatMul(a, x)",
    ),
    "sums": ("float[3,4] x", "p = CumSum(x, axis) y = Mul(p, x)"),
    "gru": (
        "float[4,2,3] x, float[1,15,3] w, float[1,15,5] r, float[1,30] b",
        "y = GRU<hidden_size = 5, linear_before_reset = 1>(x, w, r, b)",
    ),
    "lstm": (
        "float[4,2,3] x, float[1,20,3] w, float[1,20,5] r, float[1,40] b",
        "y = LSTM<hidden_size = 5>(x, w, r, b)",
    ),
}
CONSTANTS = (
    "int64[1] last = {-1}, int64[3] three = {3, 2, 2}, int64[1] from = {1}, int64[1] to = {3}, "
    "int64[3] wide = {5, 2, 2}, int64[6] pads = {1, 0, 0, 0, 2, 0}, int64[2] ids = {4, 4}, "
    "int64 axis = {1}"
)


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    # onnx-ad leaves nodes without names; a fusion of onnxruntime 1.19 then makes two of one name.
    for k, node in enumerate(model.graph.node):
        node.name = node.name or f"node.{k}"
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    known = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    values = session.run(names, {n: a for n, a in feeds.items() if n in known})
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("name", GRAPHS)
def test_agrees_with_onnx_ad(name: str) -> None:
    inputs, nodes = GRAPHS[name]
    used = [
        c
        for c in re.split(r", (?=int64)", CONSTANTS)
        if f" {c.split()[1]})" in nodes or f" {c.split()[1]}," in nodes
    ]
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net ({inputs}) => (float y) '
        f"<{', '.join(used)}> {{{nodes}}}"
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    rng = np.random.default_rng(11)
    sizes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    feeds = {n: rng.uniform(0.1, 0.9, size).astype(np.float32) for n, size in sizes.items()}
    y = run(model, feeds)["y"]
    seed = rng.standard_normal(y.shape).astype(np.float32)
    wrt = list(feeds)
    ours = run(gradient_model(model, wrt=wrt), {**feeds, "cotangent/y": seed})
    # Its seeds have one more axis, for several of them at once.
    theirs = run(onnx_ad.reverse(model, layout="onnx"), {**feeds, "adj_y": seed[..., None]})
    for name in wrt:
        mine, other = ours[f"gradient/{name}"], theirs[f"adj_{name}"][..., 0]
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=name)
