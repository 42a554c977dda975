"""The eight workloads, and two networks for images: data and initial weights."""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

import numpy as np

WIDTH, HEADS, LENGTH, INNER = 128, 4, 64, 512
"""Of the transformer: features, heads, tokens, features between."""
PIXELS = 64
"""Rows and columns of an image of W9 and W10."""
DEVICE = os.environ.get("ORTFLEX_BENCH_DEVICE", "cpu")
"""Where the peers compute that can choose."""
THREADS = int(os.environ.get("ORTFLEX_BENCH_THREADS", "1"))
"""Threads of every peer."""
STEPS = int(os.environ.get("ORTFLEX_BENCH_STEPS", "0"))
"""Steps an epoch; 0: as many as the workload says."""


class Workload(NamedTuple):
    """One problem, the same for all peers.

    ``targets`` is what is to be reached: peer's time / ours.
    """

    name: str
    text: str
    kind: str
    sizes: tuple[Any, ...]
    loss: str
    optimizer: str
    rate: float
    batch: int
    rows: int
    targets: dict[str, float]

    @property
    def steps(self) -> int:
        """Steps an epoch."""
        return self.rows // self.batch

    @property
    def reduction(self) -> str:
        """How the losses of a batch are joined."""
        return "mean" if self.loss == "softmax_cross_entropy" else "sum"

    @property
    def flops(self) -> int:
        """Operations of a step's matrix products, two a multiplication and addition."""
        if self.kind == "image":
            raise ValueError(f"the operations of {self.text} are not counted")
        if self.kind == "mlp":
            pairs = list(itertools.pairwise(self.sizes))
            first = pairs[0][0] * pairs[0][1]
            return 2 * self.batch * (3 * sum(a * b for a, b in pairs) - first)
        if self.kind == "lenet":
            one, two, dense = 24 * 24 * 20 * 25, 8 * 8 * 50 * 500, 800 * 500 + 500 * 10
            return 2 * self.batch * (2 * one + 3 * (two + dense))
        tokens = self.batch * LENGTH
        linear = 2 * tokens * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
        attention = 4 * tokens * LENGTH * WIDTH
        return 6 * (linear + attention) - 2 * tokens * WIDTH * 3 * WIDTH


def _workload(name: str, text: str, *rest: Any, **targets: float) -> Workload:
    return Workload(name, text, *rest, {k.replace("_", " "): v for k, v in targets.items()})


_MLP = (100, 50, 10, 1)
_CE = "softmax_cross_entropy"
WORKLOADS = {
    w.name: w
    for w in (
        _workload(
            *("W1", "MLP 100-50-10-1, batch 15", "mlp", _MLP),
            *("squared_error", "sgd", 1e-5, 15, 750),
            **{"torch": 12, "scikit-learn": 6.5, "on-device": 2.2, "jax_scan": 0.9},
        ),
        _workload(
            *("W2", "same, batch 100", "mlp", _MLP, "squared_error", "sgd", 2e-6, 100, 6000),
            **{"torch": 4.5, "scikit-learn": 3.5, "on-device": 1.8, "jax_scan": 1.0},
        ),
        _workload(
            *("W3", "MLP 784-256-128-10, cross entropy, momentum", "mlp", (784, 256, 128, 10)),
            *(_CE, "momentum", 0.01, 128, 6400),
            **{"torch": 1.2, "scikit-learn": 1.5, "jax_scan": 0.95},
        ),
        _workload(
            *("W4", "MLP 784-1024-1024-10, Adam", "mlp", (784, 1024, 1024, 10)),
            *(_CE, "adam", 1e-3, 256, 1280),
            **{"torch": 0.9, "on-device": 0.85, "jax_scan": 0.8},
        ),
        _workload(
            *("W5", "linear regression, batch 15", "mlp", (100, 1)),
            *("squared_error", "sgd", 1e-4, 15, 750),
            **{"torch": 18, "on-device": 2.5},
        ),
        _workload(
            *("W6", "weighted logistic regression, batch 15", "mlp", (100, 1)),
            *("log_loss", "sgd", 1e-3, 15, 750),
            torch=11,
        ),
        _workload(
            *("W7", "LeNet, batch 64", "lenet", (), _CE, "sgd", 0.05, 64, 640),
            **{"torch": 1.2, "on-device": 1.8, "jax_scan": 10},
        ),
        _workload(
            *("W8", "2 transformer blocks, batch 16, Adam", "transformer", ()),
            *(_CE, "adam", 1e-3, 16, 160),
            **{"torch": 1.0, "on-device": 1.3, "jax_scan": 1.4},
        ),
    )
}
IMAGES = {
    w.name: w
    for w in (
        _workload(
            *("W9", "ResNet-18, 64×64, batch 16", "image", ("resnet",), _CE, "momentum"),
            *(0.01, 16, 64),
        ),
        _workload(
            *("W10", "MobileNetV2, 64×64, batch 16", "image", ("mobilenet",), _CE, "momentum"),
            *(0.01, 16, 64),
        ),
    )
}


def find(name: str) -> Workload:
    """A workload, with as many steps an epoch as the environment asks for."""
    workload = {**WORKLOADS, **IMAGES}[name]
    return workload._replace(rows=STEPS * workload.batch) if STEPS else workload


def weights(workload: Workload) -> list[Any]:
    """The same start for all peers, matrices as [inputs, outputs]."""
    rng = np.random.RandomState(1)

    def normal(*shape: int, fan: int) -> Any:
        return (rng.randn(*shape) / np.sqrt(fan)).astype(np.float32)

    def zeros(size: int) -> Any:
        return np.zeros(size, np.float32)

    if workload.kind == "mlp":
        pairs = itertools.pairwise(workload.sizes)
        return [array for a, b in pairs for array in (normal(a, b, fan=a), zeros(b))]
    if workload.kind == "lenet":
        return [
            *(normal(20, 1, 5, 5, fan=25), zeros(20), normal(50, 20, 5, 5, fan=500), zeros(50)),
            *(normal(800, 500, fan=800), zeros(500), normal(500, 10, fan=500), zeros(10)),
        ]
    out: list[Any] = []
    ones = np.ones(WIDTH, np.float32)
    for _ in range(2):
        out += [normal(WIDTH, 3 * WIDTH, fan=WIDTH), zeros(3 * WIDTH)]
        out += [normal(WIDTH, WIDTH, fan=WIDTH), zeros(WIDTH), ones.copy(), zeros(WIDTH)]
        out += [normal(WIDTH, INNER, fan=WIDTH), zeros(INNER)]
        out += [normal(INNER, WIDTH, fan=INNER), zeros(WIDTH), ones.copy(), zeros(WIDTH)]
    return [*out, normal(WIDTH, 10, fan=WIDTH), zeros(10)]


def data(workload: Workload) -> tuple[Any, Any, Any]:
    """Inputs, labels, and sample weights [rows] or None."""
    rng = np.random.RandomState(0)
    rows, sizes = workload.rows, workload.sizes
    if workload.kind == "image":
        x = rng.standard_normal((rows, 3, PIXELS, PIXELS)).astype(np.float32)
        return x, rng.randint(0, 1000, rows), None
    if workload.kind == "lenet":
        x = rng.rand(rows, 1, 28, 28).astype(np.float32)
        score = x.reshape(rows, -1) @ rng.randn(784, 10).astype(np.float32)
    elif workload.kind == "transformer":
        x = rng.randn(rows, LENGTH, WIDTH).astype(np.float32)
        score = x.mean(1) @ rng.randn(WIDTH, 10).astype(np.float32)
    else:
        made = rng.randn(rows, 100) if sizes[0] == 100 else rng.rand(rows, sizes[0])
        x = made.astype(np.float32)
        score = x @ rng.randn(sizes[0], sizes[-1]).astype(np.float32)
    if workload.loss == "squared_error":
        return x, score, None
    if workload.loss == "log_loss":
        return x, (score > 0).astype(np.float32), (rng.rand(rows) + 0.5).astype(np.float32)
    return x, (score - score.mean(0)).argmax(1).astype(np.int64), None
