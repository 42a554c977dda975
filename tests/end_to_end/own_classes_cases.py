"""Small torch networks of many forms with a last layer of 10 classes, to be replaced by one of 5."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

ROWS, WIDTH, LENGTH, SIDE = 4, 6, 5, 8


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer after an embedding."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.layer = layer(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(x))[0]


class Attention(nn.Module):
    """Token and position embeddings and one transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.query = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU("tanh"), nn.Linear(12, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x) + self.positions
        q, k, v = self.query(self.norm(h)).chunk(3, dim=-1)
        h = h + torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, dim=-1) @ v
        return h + self.mix(self.norm(h))


class Patches(nn.Module):
    """An image as a sequence of patches with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        return self.norm(torch.cat([self.token.expand(h.shape[0], -1, -1), h], dim=1))


class Pooled(nn.Module):
    """The mean over positions or places."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=self.axes)


class First(nn.Module):
    """The first position of a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


class Grown(nn.Module):
    """Scores in twice the height and width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


def conv(inputs: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, WIDTH, 3, padding=1, **options)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


BODIES: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "vector": {
        "mlp": lambda: nn.Sequential(linear(), nn.Tanh()),
        "norms": lambda: nn.Sequential(
            linear(), nn.LayerNorm(WIDTH), nn.GELU("tanh"), linear(), nn.SiLU()
        ),
        "residual": lambda: nn.Sequential(linear(), Residual(nn.Sequential(nn.ELU(), linear()))),
        "words": lambda: nn.Sequential(nn.Embedding(20, WIDTH), Pooled(1), linear(), nn.Tanh()),
    },
    "plane": {
        "conv": lambda: nn.Sequential(conv(), nn.Tanh()),
        "groups": lambda: nn.Sequential(conv(), nn.GroupNorm(2, WIDTH), nn.Hardswish()),
        "depthwise": lambda: nn.Sequential(conv(), nn.SiLU(), conv(WIDTH, groups=WIDTH), nn.SiLU()),
        "shortcut": lambda: nn.Sequential(conv(), Residual(conv(WIDTH)), nn.AvgPool2d(2)),
    },
    "sequence": {
        "lstm": lambda: Recurrent(nn.LSTM),
        "gru": lambda: Recurrent(nn.GRU),
        "attention": Attention,
        "patches": Patches,
    },
}
HEADS: dict[str, dict[str, Callable[[int], nn.Module]]] = {
    "vector": {
        "linear": lambda n: nn.Sequential(nn.Linear(WIDTH, n)),
        "no bias": lambda n: nn.Sequential(nn.Linear(WIDTH, n, bias=False)),
        "logarithms": lambda n: nn.Sequential(nn.Linear(WIDTH, n), nn.LogSoftmax(dim=-1)),
        "hidden": lambda n: nn.Sequential(
            linear(), nn.ReLU(), nn.Dropout(0.0), nn.Linear(WIDTH, n)
        ),
    },
    "plane": {
        "places": lambda n: nn.Sequential(nn.Conv2d(WIDTH, n, 1)),
        "grown": lambda n: nn.Sequential(nn.Conv2d(WIDTH, n, 1), Grown()),
        "pooled": lambda n: nn.Sequential(Pooled(2, 3), nn.Linear(WIDTH, n)),
        "pooled scores": lambda n: nn.Sequential(
            nn.Conv2d(WIDTH, n, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
        "flat": lambda n: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, n)),
    },
    "sequence": {
        "tags": lambda n: nn.Sequential(nn.Linear(WIDTH, n)),
        "mean": lambda n: nn.Sequential(Pooled(1), nn.Linear(WIDTH, n)),
        "first": lambda n: nn.Sequential(First(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, n)),
        "pooler": lambda n: nn.Sequential(First(), linear(), nn.Tanh(), nn.Linear(WIDTH, n)),
    },
}
_ON_WORDS = ("words", "lstm", "gru", "attention")


def forms() -> Iterator[tuple[str, str, str]]:
    """(kind, body, head) of every network."""
    for kind, bodies in BODIES.items():
        for body in bodies:
            for head in HEADS[kind]:
                yield kind, body, head


def network(kind: str, body: str, head: str) -> tuple[nn.Sequential, torch.Tensor]:
    """A network in float32 with 10 classes, and 12 rows of its input."""
    torch.manual_seed(7)
    net = nn.Sequential(BODIES[kind][body](), HEADS[kind][head](10)).eval()
    for module in net.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):  # exporters merge equal tensors
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    rows = 3 * ROWS
    if body in _ON_WORDS:
        return net, torch.randint(0, 20, (rows, LENGTH))
    image = kind == "plane" or body == "patches"
    shape = (rows, 3, SIDE, SIDE) if image else (rows, WIDTH)
    return net, torch.randn(shape)


def with_classes(net: nn.Sequential, kind: str, head: str, values: list[Any]) -> None:
    """Give a network a last layer with 5 classes and these values: M in a layout of files, and b."""
    place = _last(net[1])
    layer = HEADS[kind][head](5)[place]
    weight = torch.from_numpy(values[0].copy())
    if weight.shape != layer.weight.shape:
        weight = weight.T.reshape(layer.weight.shape)
    layer.weight.data = weight.contiguous()
    if len(values) > 1:
        layer.bias.data = torch.from_numpy(values[1].copy()).reshape(-1)
    net[1][place] = layer


def _last(head: nn.Module) -> int:
    return max(k for k, m in enumerate(head) if isinstance(m, nn.Linear | nn.Conv2d))


def head_parameters(net: nn.Sequential) -> list[nn.Parameter]:
    return list(net[1][_last(net[1])].parameters())
