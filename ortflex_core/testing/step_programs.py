"""Step programs for the kit of backends: every optimizer, loss and kind of network, with random features.

:mod:`~ortflex_core.testing.compositions` combines features on one smooth network. The networks of this
module are small ones of common kinds, and their data have values for which kernels differ: with rows of
zeros and biases of zero, the input of a Relu is exactly 0, and a mask that is not 0 there changes the
gradients.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping

import attrs
import numpy as np
import onnx
from onnx import helper

from ortflex_core import Array
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing.compositions import FEATURES, ROWS, Composition
from ortflex_core.testing.running import model_of

OPTIMIZERS: Mapping[str, float] = {
    "sgd": 0.05,
    **dict.fromkeys(("momentum", "nesterov"), 0.02),
    "rmsprop": 0.01,
    "adagrad": 0.05,
    "adadelta": 0.5,
    **dict.fromkeys(("adam", "adamw", "nadam", "adamax", "radam", "lamb"), 0.01),
    "lars": 0.05,
    "lion": 0.005,
    "adafactor": 0.01,
    "prodigy": 0.5,
}
"""Every optimizer, with a rate that suits all networks."""
LOSSES: Mapping[str, str] = {
    **dict.fromkeys(("squared_error", "absolute_error", "elastic", "huber"), "numbers"),
    **dict.fromkeys(("quantile", "log_cosh"), "numbers"),
    **dict.fromkeys(("log_loss", "focal", "dice", "poisson"), "zero or one"),
    **dict.fromkeys(("hinge", "squared_hinge"), "signs"),
    "softmax_cross_entropy": "classes",
    "kullback_leibler": "fractions",
}
"""Every loss with one tensor, and the labels that it takes."""
_WITH = (
    *("sample_weight", "schedule", "penalty", "clip_norm", "clip_value", "transforms"),
    *("accumulate", "averaging", "constraint", "group_rate", "group_penalty", "group_frozen"),
    "batch_without_weight",
)
_CLASSES = 3


@attrs.frozen
class Network:
    """A kind of network: its nodes from ``X`` to ``Y``, weights, and the shape of a row."""

    nodes: tuple[onnx.NodeProto, ...]
    weights: Arrays
    row: tuple[int, ...]

    def model(self) -> onnx.ModelProto:
        """The network as a file."""
        return model_of(self.nodes, self.row, (_CLASSES,), self.weights)


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    fan = max(1, int(np.prod(shape[:-1]))) if len(shape) == 2 else int(np.prod(shape[1:]))
    return np.asarray(rng.standard_normal(shape) / np.sqrt(fan), np.float32)


def _zeros(size: int) -> Array:
    return np.zeros(size, np.float32)


def _linear() -> Network:
    """One product, as in the workloads W5 and W6."""
    rng = np.random.default_rng(1)
    nodes = (helper.make_node("Gemm", ["X", "W1", "b2"], ["Y"]),)
    return Network(nodes, {"W1": _normal(rng, 5, _CLASSES), "b2": _zeros(_CLASSES)}, (5,))


def _mlp(between: Callable[[dict[str, Array]], list[onnx.NodeProto]] | None = None) -> Network:
    """Products with Relu, as in the workloads W1 to W4."""
    rng = np.random.default_rng(2)
    weights = {"W1": _normal(rng, 5, 6), "b1": _zeros(6)}
    weights |= {"W2": _normal(rng, 6, _CLASSES), "b2": _zeros(_CLASSES)}
    inner = [] if between is None else between(weights)
    nodes = [
        helper.make_node("Gemm", ["X", "W1", "b1"], ["s1"]),
        helper.make_node("Relu", ["s1"], ["h1"]),
        *inner,
        helper.make_node("Gemm", ["h1" if not inner else "h2", "W2", "b2"], ["Y"]),
    ]
    return Network(tuple(nodes), weights, (5,))


def _normalizing(weights: dict[str, Array]) -> list[onnx.NodeProto]:
    """BatchNormalization in training mode."""
    parts = {"scale1": 1.1, "shift1": 0.2, "mean1": 0.1, "var1": 1.3}
    weights |= {n: np.linspace(v, v + 0.3, 6, dtype=np.float32) for n, v in parts.items()}
    names = ["h1", *parts]
    return [helper.make_node("BatchNormalization", names, ["h2"], name="norm", momentum=0.8)]


def _dropping(weights: dict[str, Array]) -> list[onnx.NodeProto]:
    """Dropout in training mode."""
    weights |= {"ratio": np.array(0.3, "f"), "training": np.array(True)}
    return [helper.make_node("Dropout", ["h1", "ratio", "training"], ["h2"], name="drop")]


def _lenet() -> Network:
    """A convolution, Relu, a pool and a product, as in the workload W7."""
    rng = np.random.default_rng(3)
    weights = {"W1": _normal(rng, 3, 1, 3, 3), "b1": _zeros(3)}
    weights |= {"W2": _normal(rng, 12, _CLASSES), "b2": _zeros(_CLASSES)}
    nodes = (
        helper.make_node("Conv", ["X", "W1", "b1"], ["s1"], kernel_shape=[3, 3]),
        helper.make_node("Relu", ["s1"], ["h1"]),
        helper.make_node("MaxPool", ["h1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p1"], ["f1"]),
        helper.make_node("Gemm", ["f1", "W2", "b2"], ["Y"]),
    )
    return Network(nodes, weights, (1, 6, 6))


def _transformer() -> Network:
    """Attention, normalization, gelu and a mean over positions, as in the workload W8."""
    rng, width = np.random.default_rng(4), 4
    weights = {n: _normal(rng, width, width) for n in ("Wq", "Wk", "Wv", "W1")}
    weights |= {"W2": _normal(rng, width, _CLASSES), "b1": _zeros(width), "b2": _zeros(_CLASSES)}
    weights |= {"scale": np.linspace(0.8, 1.2, width, dtype=np.float32), "shift": _zeros(width)}
    weights |= {"root": np.array(0.5, "f"), "half": np.array(0.5, "f"), "one": np.array(1, "f")}
    make = helper.make_node
    nodes = (
        *(make("MatMul", ["X", f"W{k}"], [k]) for k in "qkv"),
        make("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        make("MatMul", ["q", "kt"], ["raw"]),
        make("Mul", ["raw", "root"], ["score"]),
        make("Softmax", ["score"], ["share"], axis=-1),
        make("MatMul", ["share", "v"], ["mixed"]),
        make("Add", ["X", "mixed"], ["sum"]),
        make("LayerNormalization", ["sum", "scale", "shift"], ["norm"], axis=-1),
        make("MatMul", ["norm", "W1"], ["m1"]),
        make("Add", ["m1", "b1"], ["inner"]),
        make("Mul", ["inner", "root"], ["scaled"]),
        make("Erf", ["scaled"], ["erf"]),
        make("Add", ["erf", "one"], ["both"]),
        make("Mul", ["both", "half"], ["gate"]),
        make("Mul", ["inner", "gate"], ["gelu"]),
        make("ReduceMean", ["gelu"], ["mean"], axes=[1], keepdims=0),
        make("Gemm", ["mean", "W2", "b2"], ["Y"]),
    )
    return Network(nodes, weights, (3, width))


NETWORKS: Mapping[str, Callable[[], Network]] = {
    "linear": _linear,
    "mlp": _mlp,
    "mlp, normalized": lambda: _mlp(_normalizing),
    "mlp, dropping": lambda: _mlp(_dropping),
    "lenet": _lenet,
    "transformer": _transformer,
}
"""The kinds of networks of the workloads W1 to W8, as small as possible."""


def labels(kind: str, rng: np.random.Generator) -> Array:
    """Labels of one of the kinds in :data:`LOSSES`, for networks with three outputs."""
    if kind == "classes":
        return rng.integers(0, _CLASSES, ROWS)
    if kind == "numbers":
        return rng.standard_normal((ROWS, _CLASSES)).astype(np.float32)
    if kind == "fractions":
        parts = rng.uniform(0.1, 1, (ROWS, _CLASSES))
        return np.asarray(parts / parts.sum(axis=1, keepdims=True), np.float32)
    bits = rng.integers(0, 2, (ROWS, _CLASSES)).astype(np.float32)
    return bits if kind == "zero or one" else 2 * bits - 1


def every() -> Iterator[tuple[str, str, str]]:
    """All combinations (network, optimizer, loss)."""
    yield from itertools.product(NETWORKS, OPTIMIZERS, LOSSES)


def sample(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Some combinations; every network, optimizer and loss occurs in as few of them as possible."""
    rng = random.Random(f"step programs {seed}")
    turns = []
    for names in (NETWORKS, OPTIMIZERS, LOSSES):
        order: list[str] = []
        while len(order) < count:
            order += rng.sample(list(names), len(names))
        turns.append(order[:count])
    return list(zip(*turns, strict=True))


def draw(network: str, optimizer: str, loss: str, *, alone: bool = False) -> Composition:
    """A network with an optimizer, a loss and, unless ``alone``, random features."""
    rng = random.Random(f"{network} {optimizer} {loss}")
    numbers = np.random.default_rng(rng.randrange(10**6))
    made = NETWORKS[network]()
    x = numbers.standard_normal((ROWS, *made.row)).astype(np.float32)
    # The first batch has a row of zeros, whose products are exactly 0.
    x[1] = 0
    composition = Composition(
        model=made.model(),
        options={
            "optimizer": optimizer,
            "learning_rate": OPTIMIZERS[optimizer],
            "loss": loss,
            "reduction": rng.choice(["mean", "mean", "sum"]),
            "epochs": 1,
            "batch_size": 4,
            "shuffle": False,
            "seed": rng.randrange(1000),
        },
        x=x,
        y=labels(LOSSES[loss], numbers),
        weight=None,
    )
    if composition.options["reduction"] == "sum":
        composition.options["learning_rate"] /= 8
    for feature in _WITH:
        if rng.random() < 0.2 and not alone:
            rate = composition.options["learning_rate"]
            FEATURES[feature](composition, rng)
            composition.options["learning_rate"] = rate
    return composition
