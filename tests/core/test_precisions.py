"""A model whose outputs differ in their precision: the costs add up."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from tests import models
from tests.training import make, regression

X, Y = regression(rows=20, features=4, outputs=5)
SINGLE, DOUBLE = Y[:, :2], Y[:, 2:].astype(np.float64)
both = partial(zip, strict=True)


def two_precisions() -> ModelProto:
    """``single = X @ W`` in float32 and ``double = X @ V`` in float64."""
    rng = np.random.default_rng(5)
    body = "single = MatMul(X, W)  X64 = Cast <to = 11> (X)  double = MatMul(X64, V)"
    weights, outputs = {"W": rng.standard_normal((4, 2))}, "float[N, 2] single, double[N, 3] double"
    model = models.parsed(body, weights, "float[N, 4] X", outputs)
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((4, 3)), "V"))
    return model


def by_hand(steps: int, rate: float, l2: float, bound: float) -> tuple[list[float], list[Any]]:
    """Loss + penalty of every step, and the weights after the last, in float64."""
    known = models.weights_of(two_precisions())
    weights = [known[n].astype(np.float64) for n in ("W", "V")]
    costs = []
    for k in range(steps):
        x = X[5 * k : 5 * k + 5].astype(np.float64)
        errors = [x @ w - y[5 * k : 5 * k + 5] for w, y in both(weights, (SINGLE, DOUBLE))]
        costs.append(sum((e**2).mean() for e in errors) + l2 * sum((w**2).sum() for w in weights))
        slopes = [2 * x.T @ e / e.size + 2 * l2 * w for e, w in both(errors, weights)]
        norm = np.sqrt(sum((s**2).sum() for s in slopes))
        weights = [w - rate * s * min(1.0, bound / norm) for w, s in both(weights, slopes)]
    return costs, weights


@pytest.mark.parametrize("first", ["single", "double"])
@pytest.mark.parametrize("backend", ["example_numpy", "fused", "training_agent"])
def test_losses_of_two_precisions_add_up(backend: str, first: str) -> None:
    """One array of costs was read in the type of the first one."""
    labels = {"label/single": SINGLE, "label/double": DOUBLE}
    losses = dict.fromkeys([first, *({"single", "double"} - {first})], "squared_error")
    options = {"learning_rate": 0.1, "batch_size": 5, "epochs": 1, "shuffle": False}
    options |= {"penalty": {"name": "l2", "l2": 0.05}, "clip_norm": 1.5}
    trainer = make(two_precisions(), backend=backend, loss=losses, **options)
    history = trainer.fit(X, labels)
    costs, weights = by_hand(4, 0.1, 0.05, 1.5)
    assert history.losses == pytest.approx([np.mean(costs)], rel=1e-5)
    state = trainer.get_state()
    assert {n: a.dtype for n, a in state.items()} == {"W": np.float32, "V": np.float64}
    for name, wanted in both(("W", "V"), weights):
        np.testing.assert_allclose(state[name], wanted, rtol=1e-5, atol=1e-6)
