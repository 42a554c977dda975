"""Convolutional networks made by torch, trained one step by `fused`: every gradient against torch.

One step of plain gradient descent with a huge rate, so that the step is the gradient and the old
weight is rounded away; in torch the same in float64.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest

from tests.training import make

torch = pytest.importorskip("torch")

from tests import torch_files  # noqa: E402
from tests.benchmarks.large_networks import Inverted, resnet  # noqa: E402

nn = torch.nn

RATE = 1e5


def mlp() -> Any:
    return nn.Sequential(
        nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4, bias=False)
    )


def lenet() -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 10, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(160, 30),
        nn.ReLU(),
        nn.Linear(30, 10),
    )


def mobilenet() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU6(),
        Inverted(4, 4, 1, 3),
        Inverted(4, 6, 2, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


class UNet(nn.Module):  # type: ignore[misc, name-defined]
    """Two ways up: a transposed convolution, and Resize with a convolution after it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.middle = nn.Conv2d(12, 6, 3, padding=1)
        self.larger = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.nearest = nn.Upsample(scale_factor=2)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Any) -> Any:
        pool = nn.functional.max_pool2d
        one = torch.relu(self.enter(x))
        two = torch.relu(self.down(pool(one, 2)))
        three = torch.relu(self.deep(pool(two, 2)))
        back = torch.relu(self.middle(torch.cat([self.up(three), two], dim=1)))
        return self.last(torch.cat([self.larger(back), self.nearest(back), one], dim=1)).mean(
            (2, 3)
        )


NETWORKS: Mapping[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "mlp": (mlp, (12,)),
    "lenet": (lenet, (1, 28, 28)),
    "resnet": (lambda: resnet(4, 1, 5), (3, 32, 32)),
    "mobilenet": (mobilenet, (3, 16, 16)),
    "unet": (UNet, (2, 8, 8)),
    "resnet-18": (lambda: resnet(16, 2, 5), (3, 64, 64)),
}
SLOW = {"resnet-18"}


@functools.cache
def made(name: str) -> tuple[Any, onnx.ModelProto]:
    """A network, and its file with a dynamic batch and weights under torch's names."""
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = build().eval()
    with torch.no_grad():
        for layer in network.modules():
            if isinstance(layer, nn.BatchNorm2d):
                # The exporter would write equal tensors once, and Identity nodes to the others.
                for tensor in (layer.weight, layer.running_var):
                    tensor.uniform_(0.5, 1.5)
                for tensor in (layer.bias, layer.running_mean):
                    tensor.uniform_(-0.3, 0.3)
    # This exporter is torch's old one; models made by it are what people have.
    x = torch.zeros(2, *shape)
    return network, torch_files.exported(network, x, ["X"], ["scores"], **torch_files.AS_TRAINED)


def batch(name: str, rows: int) -> tuple[Any, Any]:
    _, shape = NETWORKS[name]
    rng = np.random.default_rng([5, rows])
    x = rng.standard_normal((rows, *shape)).astype(np.float32)
    return x, rng.integers(0, 3, rows)


def torch_gradients(network: Any, x: Any, y: Any) -> dict[str, Any]:
    twin = network.double().train()
    twin.zero_grad()
    nn.functional.cross_entropy(twin(torch.tensor(x).double()), torch.tensor(y)).backward()
    return {n: p.grad.numpy().copy() for n, p in twin.named_parameters()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NETWORKS]
)
def test_every_gradient_equals_torch(name: str) -> None:
    network, model = made(name)
    check(network, model, name)


def check(network: Any, model: onnx.ModelProto, name: str) -> None:
    """Steps of two batches that are the gradients, against torch in float64."""
    trainer = make(
        model,
        loss="softmax_cross_entropy",
        learning_rate=RATE,
        backend="fused",
        batch_size=6,
        batch_norm="train",
    )
    start = trainer.get_state()
    # The first batch has a graph of constant sizes, another size gets the dynamic one.
    for rows in (6, 4):
        x, y = batch(name, rows)
        exact = torch_gradients(copy.deepcopy(network), x, y)
        assert set(start) == set(exact)
        trainer.set_state(start)
        trainer.step((x, y))
        after = trainer.get_state()
        scale = max(np.linalg.norm(g) for g in exact.values())
        for parameter, gradient in exact.items():
            ours = (start[parameter].astype(np.float64) - after[parameter]) / RATE
            error = np.linalg.norm(ours - gradient)
            assert error <= 1e-4 * np.linalg.norm(gradient) + 1e-6 * scale, (parameter, rows)
