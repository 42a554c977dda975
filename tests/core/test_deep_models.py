"""Models of many layers: nothing about a step may depend on how many parameters there are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortflex_core import Binder, GraphError, Port, TensorSpec, Trace, build
from tests import models, oracles
from tests.training import BACKENDS, make, regression, same, usable

X, Y = regression(rows=32)
BATCH = 8
UPDATES: dict[str, tuple[dict[str, Any], Callable[..., Any], tuple[str, ...]]] = {
    "sgd": ({}, oracles.sgd, ()),
    "adam": ({"eps": 1e-4}, oracles.adam, ("m", "v")),
}


def trained(weights: Any, layers: int, optimizer: str, rate: float) -> tuple[Any, list[float]]:
    """Weights after an epoch, and the loss of each step: backpropagation in float64."""
    options, update, names = UPDATES[optimizer]
    w = {n: a.astype(np.float64) for n, a in weights.items()}
    slots = {n: dict.fromkeys(names, np.zeros_like(a)) for n, a in w.items()}
    losses = []
    for step in range(len(X) // BATCH):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        hidden = [X[rows].astype(np.float64)]
        for k in range(1, layers + 2):
            made = hidden[-1] @ w[f"W{k}"] + w[f"b{k}"]
            hidden.append(made if k > layers else np.tanh(made))
        error = hidden[-1] - Y[rows]
        losses.append(float(np.square(error).mean()))
        slope, slopes = 2 * error / error.size, {}
        for k in range(layers + 1, 0, -1):
            slopes[f"W{k}"], slopes[f"b{k}"] = hidden[k - 1].T @ slope, slope.sum(axis=0)
            slope = (slope @ w[f"W{k}"].T) * (1 - hidden[k - 1] ** 2)
        for n, g in slopes.items():
            w[n], slots[n] = update(w[n], g, rate, step + 1, slots[n], **options)
    return w, losses


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layers", [1, 20, 40, 100])
@pytest.mark.parametrize("optimizer", UPDATES)
def test_models_of_any_depth_train_as_in_float64(optimizer: str, layers: int, backend: str) -> None:
    model = models.mlp((5,) + (8,) * layers + (1,))
    trainer = make(
        model,
        optimizer={"name": optimizer, **UPDATES[optimizer][0]},
        backend=usable(backend),
        learning_rate=0.01,
        shuffle=False,
        batch_size=BATCH,
        epochs=1,
    )
    trainer.fit(X, Y)
    weights, losses = trained(models.weights_of(model), layers, optimizer, 0.01)
    same(trainer.get_state(), weights, 2e-5)
    np.testing.assert_allclose(trainer.train_losses_[0], np.mean(losses), rtol=1e-4)


@pytest.mark.parametrize("count", [1, 64, 65, 500])
def test_a_split_into_any_number_of_parts_keeps_their_shapes(count: int) -> None:
    trace = Trace({"": 17})
    sizes = [k % 3 + 1 for k in range(count)]
    vector = trace.input("vector", np.float32, (sum(sizes),))
    parts = trace.op("Split", vector, trace.op.constant(sizes), axis=0, outputs=count)
    assert [part.shape for part in np.atleast_1d(np.asarray(parts, object))] == [
        (s,) for s in sizes
    ]


def test_an_updated_value_keeps_its_shape_if_inference_fails() -> None:
    trace = Trace({"": 17})
    port = Port("parameter", of="w")
    weight = trace.input(port, np.float32, (3,))
    shape = trace.input("shape", np.int64, ("rank",))
    moved = trace.op.Reshape(weight * 2, shape)
    assert moved.shape is None
    program = build(trace, {port: moved}, name="step")
    assert program.gives[port].shape == (3,)


def test_memory_is_not_bound_where_the_rank_is_unknown() -> None:
    binder = Binder(object(), "step", binding=SimpleNamespace(bind_output=None))
    with pytest.raises(GraphError, match=r"the step graph: the rank of 'new/b0' is unknown"):
        binder.output_at(TensorSpec("new/b0", 1, None), object(), None, 0)
