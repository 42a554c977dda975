"""Recurrent networks, transformers and an autoencoder, made by torch: every gradient against torch's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Array, gradient_model
from tests.training import make

torch = pytest.importorskip("torch")

from tests import models, torch_files  # noqa: E402
from tests.benchmarks.large_networks import Block, Decoder  # noqa: E402

nn = torch.nn
F = nn.functional


class Recurrent(nn.Module):  # type: ignore[misc, name-defined]
    """Words to classes by the last step of a recurrent layer."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.layer = kind(6, 5, batch_first=True, **options)
        self.out = nn.Linear(5 * (1 + options.get("bidirectional", False)), 3)

    def forward(self, x: Any) -> Any:
        return self.out(self.layer(self.words(x))[0][:, -1])


class Encoder(nn.Module):  # type: ignore[misc, name-defined]
    """After BERT: words and places, norms after the shortcuts, classes from the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(13, 8), nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.Sequential(*(Block(8, 2, 7, causal=False, first=False) for _ in range(2)))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        x = self.words(x) + self.places(torch.arange(7))
        return self.out(torch.tanh(self.blocks(self.norm(x))[:, 0]))


class Vision(nn.Module):  # type: ignore[misc, name-defined]
    """After ViT: patches of an image as words."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.Sequential(*(Block(8, 2, 5, causal=False) for _ in range(2)))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        return self.out(self.blocks(x)[:, 0])


def autoencoder() -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1),
        nn.GroupNorm(4, 4),
        nn.Tanh(),
        nn.Conv2d(4, 2, 1),
    )


NETWORKS: Mapping[str, Callable[[], Any]] = {
    "lstm": lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2),
    "gru": lambda: Recurrent(nn.GRU, bidirectional=True),
    "rnn": lambda: Recurrent(nn.RNN, nonlinearity="tanh"),
    "encoder": Encoder,
    "decoder": lambda: Decoder(layers=2, width=8, heads=2, words=13, places=7),
    "vision": Vision,
    "autoencoder": autoencoder,
}
SHAPES = {"vision": (3, 3, 8, 8), "autoencoder": (3, 2, 8, 8)}


@functools.cache
def made(name: str, fixed: bool = False) -> tuple[Any, onnx.ModelProto, Any]:
    """A network, its file at opset 17, and data; the batch is dynamic unless it is fixed."""
    torch.manual_seed(3)
    network = NETWORKS[name]().train()
    x = torch.randn(SHAPES[name]) if name in SHAPES else torch.randint(0, 11, (3, 7))
    options = torch_files.AS_TRAINED | {"training": torch.onnx.TrainingMode.TRAINING}
    return network, torch_files.exported(network, x, fixed=fixed, **options), x


def compare(got: Mapping[str, Array], network: Any) -> None:
    expected = {n: p.grad.double().numpy() for n, p in network.named_parameters()}
    assert set(got) == set(expected)
    largest = max(np.linalg.norm(e) for e in expected.values())
    for name, e in expected.items():
        distance = np.linalg.norm(got[name].astype(float) - e)
        assert distance <= 1e-4 * np.linalg.norm(e) + 1e-6 * largest, name


@pytest.mark.parametrize("fixed", [False, True], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_gradient_equals_torch(name: str, fixed: bool) -> None:
    check(*made(name, fixed))


def check(network: Any, proto: onnx.ModelProto, x: Any) -> None:
    """The gradients of a random combination of the outputs."""
    names = [n for n, _ in network.named_parameters()]
    network.zero_grad()
    y = network(x)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    y.backward(seed)
    model = gradient_model(proto, wrt=names)
    feeds = {"x": x.numpy(), "cotangent/y": seed.numpy()}
    feeds |= {n: p.detach().numpy() for n, p in network.named_parameters()}
    found = models.predict(model, feeds)
    compare({n: found[f"gradient/{n}"] for n in names}, network)


def batch(name: str) -> tuple[Any, Any]:
    """Rows of a network's input, and classes or numbers in the shape of its output."""
    network, _, x = made(name)
    rows = torch.randint(0, 11, x.shape) if x.dtype == torch.int64 else torch.randn(x.shape)
    with torch.no_grad():
        shape = network(rows).shape
    y = torch.randint(0, shape[1], shape[:1]) if len(shape) == 2 else torch.randn(shape)
    return rows.numpy(), y.numpy()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in ("lstm", "encoder", "autoencoder")))
        for n in NETWORKS
    ],
)
def test_training_follows_torch(name: str, optimizer: str) -> None:
    """Fifty steps: smooth networks run freely, compared with those of torch in float64."""
    network, proto, _ = made(name)
    batches = [batch(name) for _ in range(4)]
    classes = batches[0][1].ndim == 1
    rate = {"sgd": 0.05, "adam": 0.003}[optimizer]
    trainer = make(
        proto,
        loss="softmax_cross_entropy" if classes else "squared_error",
        optimizer=optimizer,
        learning_rate=rate,
        params=[n for n, _ in network.named_parameters()],
        backend="fused",
        batch_size=3,
    )
    reference = copy.deepcopy(network).double()
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    descent = kind(reference.parameters(), lr=rate)
    losses = []
    for x, y in (batches * 13)[:50]:
        descent.zero_grad()
        given = torch.tensor(x)
        found = reference(given.double() if given.is_floating_point() else given)
        wanted = torch.tensor(y) if classes else torch.tensor(y).double()
        loss = (F.cross_entropy if classes else F.mse_loss)(found, wanted)
        loss.backward()
        descent.step()
        losses.append((trainer.step((x, y)), loss.item()))
    got, expected = np.array(losses).T
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert expected[-4:].mean() < expected[:4].mean()  # something was learned
