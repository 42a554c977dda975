"""Networks made by torch: ResNet-18 and MobileNetV2, and a GPT-2 of 12 layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests import torch_files


class Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.short = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))  # type: ignore[no-any-return]


def resnet(width: int = 64, blocks: int = 2, classes: int = 1000) -> nn.Module:
    """ResNet-18 (He et al. 2015), 11.7 million parameters; or one with fewer of everything."""
    stages: list[nn.Module] = []
    before = width
    for k in range(4):
        for block in range(blocks):
            after = width * 2**k
            stages.append(Residual(before, after, 2 if k and not block else 1))
            before = after
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(before, classes),
    )


class Inverted(nn.Module):
    """A wider layer, a depthwise 3×3 convolution, a narrower layer; a shortcut where sizes allow it."""

    def __init__(self, before: int, after: int, stride: int, factor: int) -> None:
        super().__init__()
        inner = before * factor
        self.adds = stride == 1 and before == after
        wider = [nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()]
        self.body = nn.Sequential(
            *(wider if factor > 1 else []),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.body(x)
        return x + made if self.adds else made  # type: ignore[no-any-return]


def mobilenet() -> nn.Module:
    """MobileNetV2 (Sandler et al. 2018), 3.5 million parameters."""
    stages: list[nn.Module] = []
    before = 32
    for factor, after, count, stride in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for k in range(count):
            stages.append(Inverted(before, after, 1 if k else stride, factor))
            before = after
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()),
        *stages,
        *(nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)),
    )


class Block(nn.Module):
    """Attention and two linear layers, each with a shortcut; norms are before or after them."""

    def __init__(
        self, width: int, heads: int, places: int, *, causal: bool = True, first: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.first = heads, causal, first
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        # Not by Trilu: onnxruntime 1.16 has none for booleans.
        self.register_buffer("later", torch.ones(places, places).triu(1).bool(), persistent=False)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = (
            t.reshape(b, s, self.heads, -1).transpose(1, 2) for t in self.into(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(2, 3) / (w // self.heads) ** 0.5
        if self.causal:
            scores = scores.masked_fill(self.later, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, w))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gelu = nn.functional.gelu
        if self.first:
            x = x + self.attend(self.one(x))
            raised = gelu(self.up(self.two(x)), approximate="tanh")
            return x + self.down(raised)  # type: ignore[no-any-return]
        x = self.one(x + self.attend(x))
        return self.two(x + self.down(gelu(self.up(x))))  # type: ignore[no-any-return]


class Turned(nn.Module):
    """The axes of channels and places, exchanged."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class Mean(nn.Module):
    """The mean over the places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Decoder(nn.Module):
    """After GPT-2: the words' table is the last layer, too."""

    def __init__(self, layers: int, width: int, heads: int, words: int, places: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.blocks = nn.Sequential(*(Block(width, heads, places) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.norm(self.blocks(x)) @ self.words.weight.T  # type: ignore[no-any-return]


def made(name: str, folder: Path, **size: int) -> tuple[Path, Any, Any]:
    """The file of a network with random weights, and a batch for it."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    if name == "resnet":
        network = resnet()
        x: Any = rng.standard_normal((4, 3, 224, 224), np.float32)
        y = rng.integers(0, 1000, 4)
    else:
        size = {"layers": 12, "width": 768, "heads": 12, "words": 5000, "places": 32} | size
        network = Decoder(**size)
        x = rng.integers(0, size["words"], (2, size["places"]))
        y = rng.integers(0, size["words"], x.shape)
    path = folder / f"{name}.onnx"
    path.write_bytes(exported(network.eval(), x))
    return path, x, y


def exported(network: nn.Module, x: Any) -> bytes:
    """The file of a network, with its BatchNormalization and Dropout as they are and a free batch."""
    return torch_files.exported(
        network, torch.tensor(x), **torch_files.AS_TRAINED
    ).SerializeToString()
