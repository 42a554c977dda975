"""Losses of 50 steps of networks made by torch: from torch's weights at each step, and running freely."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from tests.end_to_end import test_networks_sequence as sequence
from tests.end_to_end import test_networks_vision as vision
from tests.training import make

torch = pytest.importorskip("torch")

STEPS = 50
SMOOTH = tuple(sequence.NETWORKS)
# The graphs of recurrent networks take seconds to build; each kind of layer is in one of these.
QUICK = {"mlp", "lenet", "mobilenet", "encoder", "autoencoder"}
RATES = {"sgd": 0.05, "adam": 0.003}


def slow_but(names: Any, quick: set[str]) -> list[Any]:
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


def opened(name: str) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """A network in float64, its file, and four batches."""
    rng = np.random.default_rng(21)
    if name in vision.NETWORKS:
        network, model = vision.made(name)
        batches = [vision.batch(name, rows) for rows in (6, 5, 6, 6)]
        return copy.deepcopy(network).double().train(), model, batches
    network, model, x = sequence.made(name)
    shape = network(x).shape
    batches = []
    for _ in range(4):
        rows = torch.randint(0, 11, x.shape) if x.dtype == torch.int64 else torch.randn(x.shape)
        if len(shape) == 2:
            y = rng.integers(0, shape[1], len(x))
        else:
            y = rng.standard_normal(shape).astype(np.float32)
        batches.append((rows.numpy(), y))
    return copy.deepcopy(network).double().train(), model, batches


def trainer_for(network: Any, model: Any, y: Any, optimizer: str) -> Any:
    return make(
        model,
        loss="softmax_cross_entropy" if y.dtype.kind == "i" else "squared_error",
        optimizer=optimizer,
        learning_rate=RATES[optimizer],
        params=[n for n, _ in network.named_parameters()],
        backend="fused",
        batch_size=6,
        batch_norm="train",
    )


class Reference:
    """torch's own training in float64."""

    def __init__(self, network: Any, optimizer: str) -> None:
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        self.network = network
        self.optimizer = kind(network.parameters(), lr=RATES[optimizer])

    def step(self, x: Any, y: Any) -> float:
        self.optimizer.zero_grad()
        given = torch.tensor(x)
        predicted = self.network(given.double() if given.is_floating_point() else given)
        if y.dtype.kind == "i":
            loss = torch.nn.functional.cross_entropy(predicted, torch.tensor(y))
        else:
            loss = torch.nn.functional.mse_loss(predicted, torch.tensor(y).double())
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def weights(self) -> dict[str, Any]:
        return {
            n: p.detach().numpy().astype(np.float32) for n, p in self.network.named_parameters()
        }


@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("name", slow_but([*vision.NETWORKS, *SMOOTH], QUICK))
@pytest.mark.sampled
def test_each_step_from_torchs_weights(name: str, optimizer: str) -> None:
    """A loss is continuous where relu and max-pooling have ties: none has to be set aside."""
    network, model, batches = opened(name)
    reference = Reference(network, optimizer)
    trainer = trainer_for(network, model, batches[0][1], optimizer)
    for k in range(STEPS):
        batch = batches[k % len(batches)]
        trainer.set_state(reference.weights())
        got, expected = trainer.step(batch), reference.step(*batch)
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-5), k


@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("name", slow_but(SMOOTH, {"encoder", "autoencoder"}))
@pytest.mark.sampled
def test_smooth_networks_train_like_torch_for_many_steps(name: str, optimizer: str) -> None:
    network, model, batches = opened(name)
    reference = Reference(network, optimizer)
    trainer = trainer_for(network, model, batches[0][1], optimizer)
    losses = [(trainer.step(b), reference.step(*b)) for b in (batches * 13)[:STEPS]]
    got, expected = np.array(losses).T
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert expected[-4:].mean() < expected[:4].mean()  # something was learned
