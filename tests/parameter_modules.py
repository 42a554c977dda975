"""Small modules of torch for the tests about parameters, and the inputs that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]
Builder = Callable[[], Built]


class Call(nn.Module):
    """A module called with named arguments, one tensor of its result as the output."""

    def __init__(self, net: nn.Module, names: tuple[str, ...], pick: str = "", **more: Any) -> None:
        super().__init__()
        self.net = net
        self.names, self.pick, self.more = names, pick, more

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.names, args, strict=True))
        result = self.net(**given, **self.more) if self.names[0] else self.net(*args, **self.more)
        if self.pick:
            return getattr(result, self.pick)
        return result[0] if isinstance(result, tuple | list) else result


class First(nn.Module):
    """The first tensor of what a module gives."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        out = self.net(*args)
        while isinstance(out, tuple | list):
            out = out[0]
        return out


def sequence(batch: int = 2, length: int = 5, width: int = 8) -> torch.Tensor:
    """Rows of a sequence model."""
    return torch.randn(batch, length, width)


def image(size: int = 32, channels: int = 3, batch: int = 2) -> torch.Tensor:
    """Pictures."""
    return torch.randn(batch, channels, size, size)


def tokens(high: int = 50, length: int = 7, batch: int = 2) -> torch.Tensor:
    """Token ids."""
    return torch.randint(3, high, (batch, length))


# ---------------------------------------------------------------- torch.nn


class Positions(nn.Module):
    """Learned positions added to the raw input, before the first product."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.positions)


class Tokens(nn.Module):
    """A class token in front of a sequence, embedded positions, a sinusoid table as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.embed = nn.Embedding(50, 8)
        self.position = nn.Embedding(16, 8)
        at = torch.arange(16)[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
        self.register_buffer("table", torch.stack([at.sin(), at.cos()], -1).reshape(16, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.position(at) + self.table[: ids.shape[1]]
        x = torch.cat([self.cls_token.expand(ids.shape[0], -1, -1), x], 1)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x[:, 0])


class OneAndScale(nn.Module):
    """A scale kept as its difference from 1, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 3)
        self.weight = nn.Parameter(torch.zeros(6))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)
        return self.second(h) * self.temperature.exp()


class Standardized(nn.Conv2d):
    """A convolution with standardized weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return torch.nn.functional.conv2d(x, w, self.bias, self.stride, self.padding)


class Experts(nn.Module):
    """A mixture of experts whose matrices are picked by index."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))
        self.bias = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, k = self.router(x).softmax(-1).max(-1)
        w = self.experts[k]
        return p[:, None] * (torch.einsum("bi,bij->bj", x, w) + self.bias[k])


class Latents(nn.Module):
    """Latents that attend to the input, as perceivers have."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, 8))
        self.norm = nn.LayerNorm(8)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.norm(self.latents).expand(x.shape[0], -1, -1)
        return self.head((q + self.cross(q, x, x, need_weights=False)[0]).mean(1))


class Normalized(nn.Module):
    """Pictures normalized by buffers in the network, a blur kernel, then layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406])[:, None, None])
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225])[:, None, None])
        blur = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("kernel", (blur[:, None] * blur / 16).repeat(4, 1, 1, 1))
        self.conv = nn.Conv2d(3, 4, 3)
        self.act = nn.PReLU(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.conv((x - self.mean) / self.std))
        h = torch.nn.functional.conv2d(h, self.kernel, groups=4)
        # No mean: torch's newer exporter would call two tensors so.
        return self.head(h.sum((2, 3)))


class Causal(nn.Module):
    """Attention with a causal mask of large negative numbers as a buffer, rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mask", torch.triu(torch.full((5, 5), -1e9), 1))
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, 8, 2) / 8))
        self.scale = nn.Parameter(torch.rand(8))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])[:, None].float() * self.inv_freq[None]
        at = torch.cat([at, at], -1)
        half = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return x * at.cos() + half * at.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.turned(self.q(x)), self.turned(self.k(x))
        return (q @ k.transpose(1, 2) + self.mask).softmax(-1) @ self.v(x) * self.scale


class Frozen(nn.Module):
    """Two linear layers around a fixed random projection that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 3)
        self.alpha = nn.Parameter(torch.ones(6))
        self.beta = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.alpha * torch.tanh(self.first(x)) + self.beta)


class TwoInputs(nn.Module):
    """A bilinear form, cosine similarity and an embedding bag."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, mode="mean")
        self.bilinear = nn.Bilinear(8, 8, 3)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.bilinear(self.bag(ids), x)
