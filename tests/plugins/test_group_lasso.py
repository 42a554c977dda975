"""The group lasso beside torch: values and gradients of every rank and axis, and a training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import OrtflexError, Trainer
from ortflex_core.testing.penalty import run
from ortflex_plugins.penalties.elastic import GroupLasso
from tests.models import linear, mlp, weights_of
from tests.training import usable

torch = pytest.importorskip("torch")


def of_torch(weight: Any, factor: float, axis: int | None, by_size: bool) -> tuple[float, Any]:
    """Value and gradient by torch's norm, whose gradient at 0 is 0."""
    w = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    rows = w.reshape(1, -1) if axis is None else w.movedim(axis, 0).reshape(w.shape[axis], -1)
    scale = rows.shape[1] ** 0.5 if by_size else 1.0
    cost = factor * scale * torch.linalg.vector_norm(rows, dim=1).sum()
    cost.backward()
    return cost.item(), w.grad.numpy()


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        *[((5,), 0), ((5,), None), ((4, 3), 0), ((4, 3), 1), ((4, 3), -1), ((4, 3), None)],
        *[((4, 3, 2), 1), ((4, 2, 3, 3), 0), ((4, 2, 3, 3), None), ((1, 1), 0)],
    ],
)
def test_value_and_gradient(shape: tuple[int, ...], axis: int | None, by_size: bool) -> None:
    weight = np.random.default_rng(0).normal(size=shape)
    if shape[0] > 1:
        weight[1] = 0.0
    got = run(GroupLasso(factor=0.3, axis=axis, by_size=by_size), weight)
    value, gradient = of_torch(weight, 0.3, axis, by_size)
    np.testing.assert_allclose(got["value"], value, rtol=1e-12)
    np.testing.assert_allclose(got["gradient"], gradient, rtol=1e-12, atol=1e-15)


def test_a_weight_of_zeros_has_no_gradient() -> None:
    got = run(GroupLasso(factor=1.0), np.zeros((3, 4), np.float32))
    assert got["value"] == 0
    assert not got["gradient"].any()


@pytest.mark.parametrize("backend", ["fused", "training_agent", "training_session"])
def test_a_training_is_that_of_torch(backend: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6)).astype(np.float32), rng.normal(size=(20, 1)).astype(np.float32)
    usable(backend)
    weights = {n: torch.tensor(np.array(a)) for n, a in weights_of(mlp()).items()}
    for w in weights.values():
        w.requires_grad_(requires_grad=True)
    kernels = [n for n, w in weights.items() if w.ndim == 2]
    biases = [n for n in weights if n not in kernels]
    for k in range(0, 20, 5):
        h = torch.tensor(x[k : k + 5])
        for j, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
            h = h @ weights[kernel] + weights[bias]
            h = torch.tanh(h) if j < len(kernels) - 1 else h
        cost = ((h - torch.tensor(y[k : k + 5])) ** 2).mean()
        for name in kernels:
            rows = weights[name]
            cost = cost + 0.05 * rows.shape[1] ** 0.5 * torch.linalg.vector_norm(rows, dim=1).sum()
        for w, g in zip(
            weights.values(), torch.autograd.grad(cost, list(weights.values())), strict=True
        ):
            w.data -= 0.1 * g

    trainer = Trainer(
        mlp(),
        loss="squared_error",
        penalty={name: GroupLasso(factor=0.05) for name in kernels},
        backend=backend,
        optimizer="sgd",
        learning_rate=0.1,
        batch_size=5,
        epochs=1,
        shuffle=False,
    )
    trainer.fit(x, y)
    for name, array in trainer.get_state().items():
        np.testing.assert_allclose(array, weights[name].detach(), rtol=2e-4, atol=2e-6)


def test_an_axis_that_a_weight_lacks_is_refused() -> None:
    trainer = Trainer(linear(), loss="squared_error", penalty=GroupLasso(axis=1))
    rows = np.zeros((4, 5), np.float32)
    with pytest.raises(OrtflexError, match="axis 1 does not exist in a weight of rank 1"):
        trainer.fit(rows, rows[:, :1])
