"""The caching binder: nothing is bound twice, what is bound stays alive; in models of any depth, too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    Binder,
    GraphError,
    Host,
    HostVector,
    Port,
    TensorSpec,
    Trace,
    build,
    get_session,
)
from ortflex_plugins.devices import Cpu
from tests import models, oracles
from tests.training import BACKENDS, make, regression, same, usable

CPU = Cpu()


@pytest.fixture
def program() -> Any:
    trace = Trace({"": 17})
    x = trace.input("x", np.float32, ("N", 2))
    return build(trace, {"y": Host.symbol("a") * (x * x) + Host.symbol("b")}, name="parabola")


def bound(program: Any, x: Any) -> tuple[Binder, HostVector, Any, Any]:
    binder = Binder(get_session(program, CPU), program.name)
    hosts = HostVector(program, CPU, {"b": 0.5})
    given, out = CPU.put(x), CPU.empty(x.shape, x.dtype)
    binder.input("x", given)
    binder.output("y", out)
    binder.hosts(hosts)
    return binder, hosts, given, out


def test_only_what_changed_is_bound_again(program: Any) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    binder, hosts, given, out = bound(program, x)
    assert (binder.made, binder.reused) == (4, 0)
    for a in (1.0, 2.0):
        hosts.update({"a": a})
        binder.input("x", given)
        binder.output("y", out)
        binder.hosts(hosts)
        binder.run()
        np.testing.assert_allclose(CPU.read(out), a * x**2 + 0.5)
    assert (binder.made, binder.reused) == (4, 4)
    # Another array in the same memory needs no binding; other memory does.
    CPU.write(given, x + 1)
    binder.run()
    np.testing.assert_allclose(CPU.read(out), 2 * (x + 1) ** 2 + 0.5)
    assert (binder.made, binder.reused) == (4, 8)
    binder.input("x", CPU.put(x))
    assert (binder.made, binder.reused) == (5, 8)
    binder.run()
    assert (binder.made, binder.reused) == (5, 11)


def test_another_shape_is_bound_again(program: Any) -> None:
    x = np.ones((3, 2), np.float32)
    binder, hosts, *_ = bound(program, x)
    hosts.update({"a": 3.0})
    small, out = CPU.put(x[:1]), CPU.empty((1, 2), np.float32)
    binder.input("x", small)
    binder.output("y", out)
    assert binder.made == 6
    binder.run()
    np.testing.assert_allclose(CPU.read(out), 3.5)


def test_what_is_bound_stays_alive(program: Any) -> None:
    x = np.ones((1000, 2), np.float32)
    binder, hosts, _, out = bound(program, x)
    hosts.update({"a": 1.0})
    for k in range(20):
        binder.input("x", CPU.put(np.full_like(x, k)))
        gc.collect(0)
        # Memory that was let go would be taken by these.
        noise = [CPU.put(np.full_like(x, -1)) for _ in range(5)]
        binder.run()
        np.testing.assert_allclose(CPU.read(out), k * k + 0.5)
        del noise


def test_host_scalars_are_computed_in_float64_and_only_if_they_changed() -> None:
    trace = Trace({"": 17})
    x = trace.input("x", np.float32, ())
    beta, step = Host.symbol("beta"), Host.symbol("step")
    program = build(trace, {"y": x * (1 - beta**step)}, name="correction")
    hosts = HostVector(program, CPU, {"beta": 0.999})
    assert hosts.varying == ("step",)
    binder = Binder(get_session(program, CPU))
    out = CPU.empty((), np.float32)
    binder.input("x", CPU.put(np.float32(1).reshape(())))
    binder.output("y", out)
    binder.hosts(hosts)
    for t in (1, 1, 2):
        hosts.update({"step": t})
        binder.run()
        assert CPU.read(out).item() == np.float32(1 - 0.999**t)


def test_the_error_of_a_failing_graph_has_no_place_in_c_code(program: Any) -> None:
    binder, hosts, *_ = bound(program, np.ones((3, 2), np.float32))
    hosts.update({"a": 1.0})
    binder.output("y", CPU.empty((5, 2), np.float32))
    with pytest.raises(GraphError, match="the parabola graph failed: ") as caught:
        binder.run()
    assert "\n" not in str(caught.value)
    assert ".cc:" not in str(caught.value).split(" ")[0]


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
    options: dict[str, Any] = {"learning_rate": 0.01, "shuffle": False, "batch_size": BATCH}
    options |= {"optimizer": {"name": optimizer, **UPDATES[optimizer][0]}, "epochs": 1}
    trainer = make(model, backend=usable(backend), **options)
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
    found = [part.shape for part in np.atleast_1d(np.asarray(parts, object))]
    assert found == [(size,) for size in sizes]


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
