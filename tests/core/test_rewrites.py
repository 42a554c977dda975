"""Rewrites of the forward pass meet every kind of node and value that a file can have.

The class of defects: a rewrite that reads an input before it knows what kind of value or operator it
stands before: a sequence has no node, a graph's input and a constant have none either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from tests.training import every_backend, make, same

_HEAD = '<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x) => (float[N, 2] y)'
_WEIGHTS = "<float[4, 4] w = {1, -2, 3, 0.5, -1, 2, 0.3, 4, 0.1, 0.2, -0.3, 0.4, 2, 1, -1, -2}, "
_SPLIT = (
    _HEAD
    + _WEIGHTS
    + "int64 k = {2}, int64 first = {0}, int64 second = {1}, int64[2] sizes = {2, 2}, float one = {1}> "
)

# Each pair computes the same, with a sequence and without; what comes next is what rewrites look for.
_PAIRS = {
    "SequenceAt before a Relu": (
        "{ h = MatMul(x, w) s = SplitToSequence<axis=1>(h, k) "
        "t = SequenceAt(s, first) u = SequenceAt(s, second) r = Relu(t) y = Add(r, u) }",
        "{ h = MatMul(x, w) t, u = Split<axis=1>(h, sizes) r = Relu(t) y = Add(r, u) }",
    ),
    "a sequence of the graph's inputs": (
        "{ s = SequenceConstruct(x, x) v = SequenceAt(s, first) h = MatMul(v, w) "
        "r = Relu(h) t, u = Split<axis=1>(r, sizes) y = Add(t, u) }",
        "{ h = MatMul(x, w) r = Relu(h) t, u = Split<axis=1>(r, sizes) y = Add(t, u) }",
    ),
    "ConcatFromSequence before a Gelu by its error function": (
        "{ h = MatMul(x, w) s = SplitToSequence<axis=1>(h, k) "
        "c = ConcatFromSequence<axis=1>(s) e = Erf(c) p = Add(e, one) m = Mul(c, p) "
        "t, u = Split<axis=1>(m, sizes) y = Add(t, u) }",
        "{ c = MatMul(x, w) e = Erf(c) p = Add(e, one) m = Mul(c, p) "
        "t, u = Split<axis=1>(m, sizes) y = Add(t, u) }",
    ),
}


def _model(body: str) -> Any:
    return onnx.parser.parse_model(_SPLIT + body)


@every_backend
@pytest.mark.parametrize("case", _PAIRS)
def test_a_model_with_sequences_trains_like_the_same_model_without(backend: str, case: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 4)).astype(np.float32)
    y = rng.standard_normal((12, 2)).astype(np.float32)
    states = []
    for body in _PAIRS[case]:
        trainer = make(
            _model(body), backend=backend, params=["w"], optimizer="sgd", batch_size=4, epochs=2
        )
        trainer.fit(x, y)
        states.append(trainer.get_state())
    same(*states)


_POOLS = {
    "of the graph's input": "{ p = MaxPool<kernel_shape=[2], strides=[2]>(x) y = Mul(p, w) }",
    "of a Relu of the graph's input": (
        "{ r = Relu(x) p = MaxPool<kernel_shape=[2], strides=[2]>(r) y = Mul(p, w) }"
    ),
    "of a weight": "{ p = MaxPool<kernel_shape=[2], strides=[2]>(v) y = Mul(x, p) }",
}


@pytest.mark.parametrize("case", _POOLS)
def test_pooling_of_values_that_no_node_makes(case: str) -> None:
    wide = 2 if case == "of a weight" else 4
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[N, 1, {wide}] x) => (float[N, 1, 2] y) '
        "<float[1, 1, 2] w = {0.5, -1}, float[1, 1, 4] v = {1, 2, -3, 4}> " + _POOLS[case]
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 1, wide)).astype(np.float32)
    name = "v" if case == "of a weight" else "w"
    trainer = make(model, backend="fused", params=[name], optimizer="sgd", learning_rate=0.1)
    pooled = np.maximum(x, 0) if "Relu" in case else x
    weight = np.array([1.0, 2, -3, 4] if name == "v" else [0.5, -1])
    y = np.zeros((8, 1, 2), np.float32)
    trainer.step((x, y))
    if name == "w":
        at = pooled.reshape(8, 2, 2).max(axis=2)
        expected = weight - 0.1 * (2 * weight * at**2).mean(axis=0) / 2
    else:
        slopes = (2 * weight[[1, 3]] * x[:, 0] ** 2).mean(axis=0) / 2
        expected = weight - 0.1 * np.array([0, slopes[0], 0, slopes[1]])
    np.testing.assert_allclose(trainer.get_state()[name].reshape(-1), expected, rtol=1e-5)
