"""Every optimizer on every problem in both precisions: is torch's, converges, binds once."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Trainer, Unsupported
from tests import models
from tests.plugins.conformance_references import OPTIMIZERS
from tests.plugins.test_optimizers import TWINS as OF_TORCH
from tests.training import every_backend, make, plugins

RATES = {"sgd": 0.5, "adagrad": 0.3, "adadelta": 5.0, "radam": 0.1, "lars": 20.0}
RATES |= dict.fromkeys(("adam", "adamw", "lamb", "adamax", "adafactor"), 0.05)
RATES |= dict.fromkeys(("momentum", "nesterov", "rmsprop", "nadam", "lion"), 0.02)
LOSSES = ("squared_error", "log_loss", "softmax_cross_entropy")
# torch keeps a product of nadam in float32, whatever the weights are.
PRECISION = {np.float32: 2e-4, np.float64: 1e-9}

# Torch's with its defaults, and of what torch does not have, a formula in numpy.
TWINS = {ours.name: (twin, options) for ours, twin, options, _ in reversed(OF_TORCH)}
FORMULAS = ("lion", "lars", "lamb")


def linear(outputs: int, dtype: Any) -> onnx.ModelProto:
    made = models.linear(3, outputs)
    return made if dtype == np.float32 else models.in_float64(made)


def data(loss: str, dtype: Any) -> tuple[Any, Any]:
    x = np.random.default_rng(1).normal(size=(32, 3)).astype(dtype)
    target = x @ np.array([[1.0, -1.0], [2.0, 1.0], [0.5, 0.0]], dtype)
    labels = {
        "squared_error": target,
        "log_loss": (target > 0).astype(dtype),
        "softmax_cross_entropy": target.argmax(axis=1),
    }
    return x, labels[loss]


def slopes(w: dict[str, Any], x: Any, y: Any, loss: str) -> dict[str, Any]:
    """The gradients of the mean loss in numpy, float64."""
    scores = x @ w["coef"] + w["intercept"]
    if loss == "squared_error":
        slope = 2 * (scores - y) / y.size
    elif loss == "log_loss":
        slope = (1 / (1 + np.exp(-scores)) - y) / y.size
    else:
        shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        slope = (shares - np.eye(2)[y]) / len(y)
    return {"coef": x.T @ slope, "intercept": slope.sum(axis=0)}


def reference(optimizer: str, loss: str, batch: tuple[Any, Any], steps: int) -> dict[str, Any]:
    """The weights after some steps in float64: by torch's optimizer, where it has one."""
    x, y = (a.astype(float) if a.dtype.kind == "f" else a for a in batch)
    start = models.weights_of(linear(2, x.dtype))
    w = {n: a.astype(float) for n, a in start.items()}
    if optimizer in FORMULAS:
        formula, made = OPTIMIZERS[optimizer], plugins().component("optimizers", optimizer)
        slots = {n: dict.fromkeys(made.slots, np.zeros_like(a)) for n, a in w.items()}
        for step in range(1, steps + 1):
            for name, slope in slopes(w, x, y, loss).items():
                given = (w[name], slope, RATES[optimizer], step, slots[name])
                w[name], slots[name] = formula(*given, **made.hyper_values())
        return w
    torch = pytest.importorskip("torch")
    twin, options = TWINS[optimizer]
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in w.items()}
    theirs = getattr(torch.optim, twin)(leaves.values(), lr=RATES[optimizer], **options)
    for _ in range(steps):
        now = {n: t.detach().numpy() for n, t in leaves.items()}
        for name, slope in slopes(now, x, y, loss).items():
            leaves[name].grad = torch.tensor(slope)
        theirs.step()
    return {n: t.detach().numpy() for n, t in leaves.items()}


def trainer_of(backend: str, optimizer: str, loss: str, dtype: Any) -> Trainer:
    options = {"optimizer": optimizer, "learning_rate": RATES[optimizer], "batch_size": 32}
    return make(linear(2, dtype), loss=loss, backend=backend, **options)


def near(state: dict[str, Any], wanted: dict[str, Any], dtype: Any) -> None:
    at = PRECISION[dtype]
    for name, array in wanted.items():
        np.testing.assert_allclose(state[name], array, rtol=at, atol=at, err_msg=name)


@pytest.mark.backend("fused")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.sampled
def test_fifty_steps_are_torch_s_and_bind_once(optimizer: str, loss: str, dtype: Any) -> None:
    trainer, batch = trainer_of("fused", optimizer, loss, dtype), data(loss, dtype)
    trainer.step(batch)
    before = trainer.evaluate(*batch)["loss"]
    bound, graphs = trainer.engine.counters()["bindings_made"], set(trainer.engine.programs())
    trainer.step(batch)
    assert trainer.engine.counters()["bindings_made"] == bound
    for _ in range(48):
        trainer.step(batch)
    fifty = trainer.get_state()
    for _ in range(50):
        trainer.step(batch)
    assert set(trainer.engine.programs()) == graphs
    assert trainer.evaluate(*batch)["loss"] < 0.5 * before
    assert {array.dtype for array in trainer.get_state().values()} == {np.dtype(dtype)}
    slots = trainer.engine.slots()
    assert {a.dtype for n, a in slots.items() if n != "step"} <= {np.dtype(dtype)}
    near(fifty, reference(optimizer, loss, batch, 50), dtype)  # last: it needs torch


@every_backend
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.sampled
def test_other_backends_make_the_same_steps(backend: str, optimizer: str, dtype: Any) -> None:
    if backend == "fused":
        pytest.skip("it has the whole table")
    trainer = trainer_of(backend, optimizer, "squared_error", dtype)
    batch = data("squared_error", dtype)
    native = dtype == np.float32 and optimizer in ("sgd", "adam")
    if backend == "training_session" and not native:
        reasons = ("sgd, adam and lamb, not", "float32 only", "LambOptimizer for GPUs only")
        with pytest.raises(Unsupported, match="|".join(reasons)):
            trainer.step(batch)
        return
    for _ in range(50):
        trainer.step(batch)
    near(trainer.get_state(), reference(optimizer, "squared_error", batch, 50), dtype)
    assert {array.dtype for array in trainer.get_state().values()} == {np.dtype(dtype)}
