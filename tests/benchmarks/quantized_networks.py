"""The sixteen small networks of the table of quantization, and their data.

Data are drawn, or made from the digits of scikit-learn by moving them and adding noise: 1,500 rows to train
and 2,000 others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

TRAIN, TEST = 1500, 2000
Rows = tuple[tuple[Any, Any], tuple[Any, Any]]


def parts(x: Any, y: Any) -> Rows:
    """The rows to train with, and the others."""
    return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])


def table(seed: int) -> Rows:
    """Six classes, 30 columns."""
    from sklearn.datasets import make_classification

    x, y = make_classification(
        TRAIN + TEST, 30, n_informative=12, n_classes=6, class_sep=1.5, random_state=seed
    )
    return parts(x.astype(np.float32), y)


def curve(seed: int) -> Rows:
    """The function of Friedman 1991, of ten columns."""
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(TRAIN + TEST, noise=0.3, random_state=seed)
    return parts(x.astype(np.float32), ((y - 14) / 5).astype(np.float32)[:, None])


def digits(seed: int) -> Rows:
    """Digits, 10 × 10, moved by up to a pixel, with noise; the test has other digits."""
    from sklearn.datasets import load_digits

    draw = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    order = draw.permutation(len(images))
    images, labels = images[order].reshape(-1, 8, 8) / 16, labels[order]

    def drawn(first: int, last: int, count: int) -> tuple[Any, Any]:
        chosen = first + np.arange(count) % (last - first)
        out = 0.2 * draw.standard_normal((count, 10, 10))
        for image, k, (row, column) in zip(
            out, chosen, draw.integers(0, 3, (count, 2)), strict=True
        ):
            image[row : row + 8, column : column + 8] += images[k]
        return out[:, None].astype(np.float32), labels[chosen]

    return drawn(0, 1100, TRAIN), drawn(1100, len(images), TEST)


def waves(seed: int) -> Rows:
    """Five frequencies in noise, two channels of 32 samples."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 5, TRAIN + TEST)
    time = np.arange(32) / 32
    phase = draw.uniform(0, 2 * np.pi, (len(y), 2, 1))
    x = np.sin(2 * np.pi * (y[:, None, None] + 2) * time + phase)
    return parts((x + 1.2 * draw.standard_normal(x.shape)).astype(np.float32), y)


def shapes(seed: int) -> Rows:
    """Images, 12 × 12, of discs and squares in noise; the labels say which pixels are of a disc."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:12, :12]
    x = 0.5 * draw.standard_normal((TRAIN + TEST, 1, 12, 12))
    y = np.zeros((TRAIN + TEST, 1, 12, 12), np.float32)
    for image, mask in zip(x, y, strict=True):
        for is_disc in (True, False):
            (row, column), size = draw.uniform(2, 10, 2), draw.uniform(2, 3.5)
            far = np.abs(rows - row), np.abs(columns - column)
            inside = np.hypot(*far) < size if is_disc else np.maximum(*far) < 0.9 * size
            image[0][inside] += 1
            mask[0][inside] = is_disc
    return parts(x.astype(np.float32), y)


def words(seed: int) -> Rows:
    """Sequences of 12 of 20 words; one of four pairs of neighbors is somewhere in each."""
    draw = np.random.default_rng(seed)
    x = draw.integers(0, 20, (TRAIN + TEST, 12))
    y = draw.integers(0, 4, len(x))
    pairs = np.array([[1, 2], [2, 1], [1, 3], [3, 2]])
    place = draw.integers(0, 11, len(x))
    each = np.arange(len(x))
    x[each, place], x[each, place + 1] = pairs[y].T
    return parts(x, y)


def series(seed: int) -> Rows:
    """Five steps of four columns; the class is the column with the largest slowly forgotten sum."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((TRAIN + TEST, 5, 4)).astype(np.float32)
    return parts(x, (x * 0.8 ** np.arange(4, -1, -1)[:, None]).sum(1).argmax(1))


# Networks ------------------------------------------------------------------------------------------


def mlp() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 6))
    )


def regression() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    )


def lenet() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)),
    )


def _conv(channels: int, out: int, size: int = 3, **settings: Any) -> list[Any]:
    from torch import nn

    settings.setdefault("padding", size // 2)
    return [nn.Conv2d(channels, out, size, bias=False, **settings), nn.BatchNorm2d(out), nn.ReLU()]


def _ending(channels: int) -> list[Any]:
    from torch import nn

    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


def vgg() -> Any:
    from torch import nn

    return nn.Sequential(
        *(*_conv(1, 8), *_conv(8, 8), nn.MaxPool2d(2)),
        *(*_conv(8, 16), *_conv(16, 16), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)),
    )


def resnet() -> Any:
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Sequential(*_conv(12, 12)),
                nn.Sequential(*_conv(12, 12)[:2]),
            )

        def forward(self, x: Any) -> Any:
            return (x + self.second(self.first(x))).relu()

    return nn.Sequential(*_conv(1, 12), nn.MaxPool2d(2), Block(), Block(), *_ending(12))


def mobilenet() -> Any:
    from torch import nn

    def block(channels: int, out: int) -> list[Any]:
        found = [*_conv(channels, channels, groups=channels), *_conv(channels, out, 1)]
        return [nn.ReLU6() if isinstance(layer, nn.ReLU) else layer for layer in found]

    return nn.Sequential(
        *(*_conv(1, 12, stride=2), *block(12, 24), *block(24, 24), *_ending(24)),
    )


def densenet() -> Any:
    import torch
    from torch import nn

    class Dense(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.inner = nn.Sequential(*_conv(channels, 8))

        def forward(self, x: Any) -> Any:
            return torch.cat([x, self.inner(x)], 1)

    return nn.Sequential(
        *(*_conv(1, 8), nn.MaxPool2d(2), Dense(8), Dense(16), *_conv(24, 12, 1)),
        *(nn.AvgPool2d(2), Dense(12), *_ending(20)),
    )


def squeeze() -> Any:
    from torch import nn

    class Excite(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.gate = nn.Sequential(
                *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 8, 1), nn.ReLU()),
                *(nn.Conv2d(8, channels, 1), nn.Sigmoid()),
            )

        def forward(self, x: Any) -> Any:
            return x * self.gate(x)

    return nn.Sequential(
        *(*_conv(1, 12), nn.MaxPool2d(2), Excite(12)),
        *(*_conv(12, 24), Excite(24), *_ending(24)),
    )


def unet() -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
            self.first, self.inner = nn.Sequential(*_conv(1, 6)), nn.Sequential(*_conv(6, 12))
            self.middle = nn.Sequential(*_conv(12, 12))
            self.back, self.last = (
                nn.Sequential(*_conv(24, 8)),
                nn.Sequential(*_conv(14, 6), nn.Conv2d(6, 1, 1)),
            )

        def forward(self, x: Any) -> Any:
            first = self.first(x)
            inner = self.inner(self.pool(first))
            middle = self.grow(self.middle(self.pool(inner)))
            back = self.grow(self.back(torch.cat([inner, middle], 1)))
            return self.last(torch.cat([first, back], 1))

    return Net()


def conv1d() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv1d(2, 16, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(16, 24, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1)),
        *(nn.Flatten(), nn.Linear(24, 5)),
    )


def recurrent(gates: int) -> Any:
    """A GRU (3 gates) or LSTM (4), step by step: its products are quantized, a GRU operator is not."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.data, self.state = nn.Linear(4, 24 * gates), nn.Linear(24, 24 * gates)
            self.head = nn.Linear(24, 4)

        def forward(self, x: Any) -> Any:
            h = c = x[:, 0, :1] * torch.zeros(24)
            for k in range(5):
                new, old = self.data(x[:, k]).chunk(gates, 1), self.state(h).chunk(gates, 1)
                first, second = (torch.sigmoid(new[j] + old[j]) for j in (0, 1))
                if gates == 3:
                    h = second * h + (1 - second) * torch.tanh(new[2] + first * old[2])
                else:
                    c = second * c + first * torch.tanh(new[2] + old[2])
                    h = torch.sigmoid(new[3] + old[3]) * torch.tanh(c)
            return self.head(h)

    return Net()


def textcnn() -> Any:
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.convs = nn.ModuleList([nn.Conv1d(16, 16, size, padding=1) for size in (2, 3)])
            self.head = nn.Linear(32, 4)

        def forward(self, x: Any) -> Any:
            import torch

            h = self.embed(x).transpose(1, 2)
            return self.head(torch.cat([c(h).relu().amax(2) for c in self.convs], 1))

    return Net()


def _encoder(width: int) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in "qkvo")
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

        def forward(self, h: Any) -> Any:
            n = self.norms[0](h)
            scores = self.q(n) @ self.k(n).transpose(1, 2) / width**0.5
            h = h + self.o(torch.softmax(scores, -1) @ self.v(n))
            return h + self.down(torch.relu(self.up(self.norms[1](h))))

    return Block()


def transformer() -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Linear(4, 24), nn.Parameter(0.1 * torch.randn(5, 24))
            self.blocks = _encoder(24)
            self.head = nn.Linear(24, 4)

        def forward(self, x: Any) -> Any:
            return self.head(self.blocks(self.embed(x) + self.place).mean(1))

    return Net()


class _Patches:
    """Images of 10 × 10 as four patches of 25 pixels."""

    def __call__(self, x: Any) -> Any:
        return x.reshape(-1, 2, 5, 2, 5).transpose(2, 3).reshape(-1, 4, 25)


def vit() -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Linear(25, 32), nn.Parameter(0.1 * torch.randn(4, 32))
            self.blocks, self.head = _encoder(32), nn.Linear(32, 10)

        def forward(self, x: Any) -> Any:
            return self.head(self.blocks(self.embed(_Patches()(x)) + self.place).mean(1))

    return Net()


def mixer() -> Any:
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
            self.places = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
            self.columns = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))

        def forward(self, h: Any) -> Any:
            h = h + self.places(self.norms[0](h).transpose(1, 2)).transpose(1, 2)
            return h + self.columns(self.norms[1](h))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(25, 32), nn.Linear(32, 10)
            self.blocks = Block()

        def forward(self, x: Any) -> Any:
            return self.head(self.blocks(self.embed(_Patches()(x))).mean(1))

    return Net()


SOFTMAX, SIGMOID, SQUARED = (
    "softmax_cross_entropy",
    "binary_cross_entropy_with_logits",
    "squared_error",
)
NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[int], Rows], str]] = {
    "mlp": (mlp, table, SOFTMAX),
    "regression": (regression, curve, SQUARED),
    "lenet": (lenet, digits, SOFTMAX),
    "vgg": (vgg, digits, SOFTMAX),
    "resnet": (resnet, digits, SOFTMAX),
    "densenet": (densenet, digits, SOFTMAX),
    "mobilenet": (mobilenet, digits, SOFTMAX),
    "squeeze-excite": (squeeze, digits, SOFTMAX),
    "unet": (unet, shapes, SIGMOID),
    "conv1d": (conv1d, waves, SOFTMAX),
    "gru": (functools.partial(recurrent, 3), series, SOFTMAX),
    "lstm": (functools.partial(recurrent, 4), series, SOFTMAX),
    "textcnn": (textcnn, words, SOFTMAX),
    "transformer": (transformer, series, SOFTMAX),
    "vit": (vit, digits, SOFTMAX),
    "mixer": (mixer, digits, SOFTMAX),
}
"""A function that makes the network, one that draws rows for a seed, and the loss."""
