"""Rewrites of the forward pass meet every kind of node and value that a file can have.

The class of defects: a rewrite that reads an input before it knows what kind of value or operator it
stands before: a sequence has no node, a graph's input and a constant have none either.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import models
from tests.training import every_backend, make, same

_NUMBERS = {"k": 2, "first": 0, "second": 1, "sizes": [2, 2], "one": np.float32(1)}
_WEIGHTS = {name: np.array(number) for name, number in _NUMBERS.items()}
_WEIGHTS |= {"w": np.random.default_rng(1).standard_normal((4, 4))}
_HALVES = "t, u = Split<axis=1>({}, sizes)  y = Add(t, u)"
_SEQUENCE = "h = MatMul(x, w)  s = SplitToSequence<axis=1>(h, k)"
_GELU = f"e = Erf(c)  p = Add(e, one)  m = Mul(c, p)  {_HALVES.format('m')}"

# Each pair computes the same, with a sequence and without; what comes next is what rewrites look for.
_PAIRS = {
    "SequenceAt before a Relu": (
        f"{_SEQUENCE}  t = SequenceAt(s, first)  u = SequenceAt(s, second)",
        "h = MatMul(x, w)  t, u = Split<axis=1>(h, sizes)",
        "r = Relu(t)  y = Add(r, u)",
    ),
    "a sequence of the graph's inputs": (
        "s = SequenceConstruct(x, x)  v = SequenceAt(s, first)  h = MatMul(v, w)",
        "h = MatMul(x, w)",
        f"r = Relu(h)  {_HALVES.format('r')}",
    ),
    "ConcatFromSequence before a Gelu by its error function": (
        f"{_SEQUENCE}  c = ConcatFromSequence<axis=1>(s)",
        "c = MatMul(x, w)",
        _GELU,
    ),
}


@every_backend
@pytest.mark.parametrize("case", _PAIRS)
def test_a_model_with_sequences_trains_like_the_same_model_without(backend: str, case: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 4)).astype(np.float32)
    y = rng.standard_normal((12, 2)).astype(np.float32)
    states = []
    *starts, end = _PAIRS[case]
    for start in starts:
        model = models.parsed(f"{start}  {end}", _WEIGHTS, "float[N, 4] x", "float[N, 2] y")
        trainer = make(model, backend=backend, params=["w"], batch_size=4, epochs=2)
        trainer.fit(x, y)
        states.append(trainer.get_state())
    same(*states)


_POOL = "p = MaxPool<kernel_shape=[2], strides=[2]>"
_POOLS = {
    "of the graph's input": f"{_POOL}(x)  y = Mul(p, w)",
    "of a Relu of the graph's input": f"r = Relu(x)  {_POOL}(r)  y = Mul(p, w)",
    "of a weight": f"{_POOL}(v)  y = Mul(x, p)",
}


@pytest.mark.parametrize("case", _POOLS)
def test_pooling_of_values_that_no_node_makes(case: str) -> None:
    wide = 2 if case == "of a weight" else 4
    weights = {"w": np.array([[[0.5, -1]]]), "v": np.array([[[1, 2, -3, 4.0]]])}
    places = f"float[N, 1, {wide}] x", "float[N, 1, 2] y"
    model = models.parsed(_POOLS[case], weights, *places)
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
