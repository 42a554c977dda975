"""Drawn recipes: a network, its data, and the arguments of a Trainer, each from a seed and a number.

Nothing here needs torch, so that environments without it draw the same recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import numpy_helper, parser

Array = Any
CLASSES, WORDS, LENGTH = 4, 7, 5
MOMENTUM, EPSILON = 0.8, 1e-3
"""Of BatchNormalization."""

OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"rate": 0.1},
    "momentum": {"rate": 0.03, "beta": 0.9},
    "nesterov": {"rate": 0.03, "beta": 0.8},
    "adam": {"rate": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6},
    "adamw": {"rate": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.02},
    "rmsprop": {"rate": 0.005, "alpha": 0.9, "eps": 1e-6},
    "adagrad": {"rate": 0.05, "eps": 1e-6},
    "adadelta": {"rate": 1.0, "rho": 0.9, "eps": 1e-5},
    "adamax": {"rate": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6},
    "nadam": {"rate": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "decay": 0.004},
    "radam": {"rate": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6},
}
LOSSES = ("squared_error", "huber", "log_cosh", "absolute_error", "log_loss", "cross_entropy")
ACTIVATIONS = ("Tanh", "Sigmoid", "Relu")


@attrs.frozen(kw_only=True, eq=False)
class Network:
    """A network as text, with its weights.

    Attributes:
        nodes: the body of the graph; ``act`` is replaced by an activation.
        inputs: type and shape of the inputs, without the rows, by name.
        weights: what can be trained.
        matrices: the weights that an adapter can be attached to.
        constants: tensors that are not trained: statistics, masks.
    """

    nodes: str
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    weights: Mapping[str, Array]
    matrices: tuple[str, ...]
    constants: Mapping[str, Array] = attrs.field(factory=dict)


def _attention(given: str) -> str:
    return (
        f"q = MatMul ({given}, Wq) k = MatMul ({given}, Wk) v = MatMul ({given}, Wv) "
        "kt = Transpose <perm = [0, 2, 1]> (k) qk = MatMul (q, kt) scaled = Mul (qk, share) "
    )


def _mlp(rng: np.random.Generator, out: int) -> Network:
    a, b = rng.integers(2, 9, 2)
    n = _normal(rng)
    return Network(
        nodes="p1 = MatMul (X, W1) s1 = Add (p1, b1) h1 = act (s1) p2 = MatMul (h1, W2) "
        "s2 = Add (p2, b2) h2 = act (s2) Y = Gemm (h2, W3, b3)",
        inputs={"X": ("float", (int(a),))},
        weights={
            "W1": n(a, b),
            "b1": n(b),
            "W2": n(b, b),
            "b2": n(b),
            "W3": n(b, out),
            "b3": n(out),
        },
        matrices=("W1", "W2"),
    )


def _mlp_norm(rng: np.random.Generator, out: int) -> Network:
    a, b = rng.integers(2, 9, 2)
    n = _normal(rng)
    return Network(
        nodes="p1 = MatMul (X, W1) n1 = BatchNormalization "
        f"<epsilon = {EPSILON}, momentum = {MOMENTUM}> (p1, g, c, mean, var) "
        "h1 = act (n1) p2 = MatMul (h1, W2) Y = Add (p2, b2)",
        inputs={"X": ("float", (int(a),))},
        weights={"W1": n(a, b), "g": 1 + n(b) / 4, "c": n(b), "W2": n(b, out), "b2": n(out)},
        matrices=("W1", "W2"),
        constants={"mean": n(b) / 4, "var": np.abs(n(b)) + 0.5},
    )


def _conv_norm(rng: np.random.Generator, out: int) -> Network:
    a, b = int(rng.integers(1, 4)), int(rng.integers(2, 9))
    n = _normal(rng)
    return Network(
        nodes="p1 = Conv <pads = [1, 1, 1, 1]> (X, K1) n1 = BatchNormalization "
        f"<epsilon = {EPSILON}, momentum = {MOMENTUM}> (p1, g, c, mean, var) "
        "h1 = act (n1) p2 = Conv (h1, K2, d) h2 = act (p2) m = GlobalAveragePool (h2) "
        "f = Flatten (m) p3 = MatMul (f, W) Y = Add (p3, e)",
        inputs={"X": ("float", (a, 5, 5))},
        weights={
            "K1": n(b, a, 3, 3),
            "g": 1 + n(b) / 4,
            "c": n(b),
            "K2": n(b, b, 3, 3) / 2,
            "d": n(b),
            "W": 3 * n(b, out),
            "e": n(out),
        },
        matrices=("W",),
        constants={"mean": n(b) / 4, "var": np.abs(n(b)) + 0.5},
    )


def _attentive(rng: np.random.Generator, out: int) -> Network:
    d = int(rng.integers(2, 9))
    n = _normal(rng)
    return Network(
        nodes=_attention("X") + "a = Softmax <axis = -1> (scaled) av = MatMul (a, v) "
        "o = MatMul (av, Wo) r = Add (o, X) m = ReduceMean <axes = [1], keepdims = 0> (r) "
        "p = MatMul (m, W) Y = Add (p, b)",
        inputs={"X": ("float", (LENGTH, d))},
        weights={k: 1.5 * n(d, d) for k in ("Wq", "Wk", "Wv", "Wo")}
        | {"W": n(d, out), "b": n(out)},
        matrices=("Wq", "Wk", "Wv", "Wo", "W"),
        constants={"share": np.asarray(d**-0.5)},
    )


def _block(rng: np.random.Generator, out: int) -> Network:
    d = 2 * int(rng.integers(1, 5)) + 2
    n = _normal(rng)
    norm = f"LayerNormalization <axis = -1, epsilon = {EPSILON}>"
    return Network(
        nodes=f"e0 = Gather (E, I) e = Add (e0, P) n1 = {norm} (e, g1, c1) "
        + _attention("n1")
        + "masked = Add (scaled, mask) a = Softmax <axis = -1> (masked) av = MatMul (a, v) "
        f"o = MatMul (av, Wo) r = Add (e, o) n2 = {norm} (r, g2, c2) p1 = MatMul (n2, W1) "
        "s1 = Add (p1, b1) h = act (s1) p2 = MatMul (h, W2) s2 = Add (p2, b2) z = Add (r, s2) "
        "m = ReduceMean <axes = [1], keepdims = 0> (z) Et = Transpose <perm = [1, 0]> (E) "
        "Y = MatMul (m, Et)",
        inputs={"I": ("int64", (LENGTH,))},
        weights={"E": n(WORDS, d), "P": n(LENGTH, d)}
        | {k: 1.5 * n(d, d) for k in ("Wq", "Wk", "Wv", "Wo")}
        | {"g1": 1 + n(d) / 4, "c1": n(d) / 4, "g2": 1 + n(d) / 4, "c2": n(d) / 4}
        | {"W1": n(d, 2 * d), "b1": n(2 * d), "W2": n(2 * d, d), "b2": n(d)},
        matrices=("Wq", "Wk", "Wv", "Wo", "W1", "W2"),
        constants={
            "share": np.asarray(d**-0.5),
            "mask": np.triu(np.full((LENGTH, LENGTH), -1e4), 1),
        },
    )


def _shared(rng: np.random.Generator, out: int) -> Network:
    a, b = rng.integers(2, 9, 2)
    n = _normal(rng)
    return Network(
        nodes="p1 = MatMul (X, W1) h1 = act (p1) p2 = MatMul (h1, W2) s2 = Add (p2, b2) "
        "h2 = act (s2) p3 = MatMul (h2, W2) s3 = Add (p3, b2) h3 = act (s3) "
        "p4 = MatMul (h3, W3) Y = Add (p4, b3)",
        inputs={"X": ("float", (int(a),))},
        weights={"W1": n(a, b), "W2": n(b, b), "b2": n(b), "W3": n(b, out), "b3": n(out)},
        matrices=("W1", "W3"),
    )


def _two_inputs(rng: np.random.Generator, out: int) -> Network:
    a, b, c = rng.integers(2, 9, 3)
    n = _normal(rng)
    return Network(
        nodes="p1 = MatMul (A, W1) p2 = MatMul (B, W2) s = Add (p1, p2) t = Add (s, b1) "
        "h = act (t) p3 = MatMul (h, W3) Y = Add (p3, b3)",
        inputs={"A": ("float", (int(a),)), "B": ("float", (int(b),))},
        weights={"W1": n(a, c), "W2": n(b, c), "b1": n(c), "W3": n(c, out), "b3": n(out)},
        matrices=("W1", "W2", "W3"),
    )


def _embedding(rng: np.random.Generator, out: int) -> Network:
    a, b = rng.integers(2, 9, 2)
    n = _normal(rng)
    return Network(
        nodes="e = Gather (E, I) m = ReduceMean <axes = [1], keepdims = 0> (e) "
        "p1 = MatMul (m, W1) s1 = Add (p1, b1) h = act (s1) p2 = MatMul (h, W2) Y = Add (p2, b2)",
        inputs={"I": ("int64", (LENGTH,))},
        weights={
            "E": n(WORDS, a),
            "W1": n(a, b),
            "b1": n(b),
            "W2": n(b, out),
            "b2": n(out),
        },
        matrices=("W1", "W2"),
    )


NETWORKS: dict[str, Callable[[np.random.Generator, int], Network]] = {
    "mlp": _mlp,
    "mlp_norm": _mlp_norm,
    "conv_norm": _conv_norm,
    "attention": _attentive,
    "block": _block,
    "shared": _shared,
    "two_inputs": _two_inputs,
    "embedding": _embedding,
}


def _normal(rng: np.random.Generator) -> Callable[..., Array]:
    """Values with a scale that keeps activations near 1, exact in float32."""

    def values(*shape: int) -> Array:
        fan = shape[0] if len(shape) == 2 else int(np.prod(shape[1:])) if len(shape) > 2 else 4
        return (rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32).astype(np.float64)

    return values


@attrs.frozen(kw_only=True, eq=False)
class Recipe:
    """A training: what the Trainer and the twin get."""

    number: int
    kind: str
    activation: str
    network: Network
    loss: str
    optimizer: str
    schedule: Mapping[str, Any]
    penalty: Mapping[str, float]
    transforms: Mapping[str, float]
    averaging: Mapping[str, float]
    trained: tuple[str, ...]
    slow: tuple[str, ...]
    adapters: Mapping[str, Array]
    rank: int
    alpha: float
    norm: str
    accumulate: int
    batch: int
    epochs: int
    data: Mapping[str, Array]
    label: Array
    weight: Array | None

    def describe(self) -> str:
        frozen = sorted(set(self.network.weights) - set(self.trained))
        parts = {
            "loss": self.loss,
            "optimizer": self.optimizer,
            "schedule": dict(self.schedule),
            "penalty": dict(self.penalty),
            "transforms": dict(self.transforms),
            "averaging": dict(self.averaging),
            "frozen": frozen,
            "slow": self.slow,
            "adapters": sorted(self.adapters),
            "norm": self.norm,
            "accumulate": self.accumulate,
            "batch": self.batch,
            "rows": len(self.label),
            "weights": self.weight is not None,
        }
        given = ", ".join(f"{k}={v}" for k, v in parts.items() if v not in ({}, [], (), "", False))
        return f"{self.number}: {self.kind} ({self.activation}), {given}"


def draw(seed: int, number: int) -> Recipe:
    rng = np.random.default_rng([seed, number])

    def pick(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    kind = pick(sorted(NETWORKS))
    loss = "cross_entropy" if kind == "block" else pick(LOSSES)
    out = {"cross_entropy": CLASSES, "log_loss": 1}.get(loss, int(rng.integers(1, 4)))
    network = NETWORKS[kind](rng, out)
    batch, accumulate = int(rng.integers(3, 9)), int(pick((1, 1, 2, 3)))
    # BatchNormalization of two rows gives ±1, so that its gradients are rounding noise.
    rest = 0 if kind.endswith("norm") else int(pick((0, 0, 2)))
    rows = batch * accumulate * int(rng.integers(1, 4)) + rest
    data = {
        name: rng.integers(0, WORDS, (rows, *shape))
        if dtype == "int64"
        else rng.standard_normal((rows, *shape)).astype(np.float32)
        for name, (dtype, shape) in network.inputs.items()
    }
    classes = WORDS if kind == "block" else CLASSES
    if loss == "cross_entropy":
        label = rng.integers(0, classes, rows)
    elif loss == "log_loss":
        label = rng.integers(0, 2, (rows, 1)).astype(np.float32)
    else:
        label = rng.standard_normal((rows, out)).astype(np.float32)
    weight = None
    if rng.random() < 0.35:
        weight = rng.uniform(0.1, 2, rows).astype(np.float32)
        weight[rng.integers(0, rows)] = 0
    names = list(network.weights)
    adapters: dict[str, Array] = {}
    rank = int(rng.integers(1, 4))
    trained = names
    if rng.random() < 0.25:
        count = int(rng.integers(1, len(network.matrices) + 1))
        for name in sorted(rng.permutation(network.matrices)[:count].tolist()):
            a, b = network.weights[name].shape
            adapters[f"{name}.lora_A"] = _normal(rng)(a, rank)
            adapters[f"{name}.lora_B"] = _normal(rng)(rank, b) / 2
        trained = []
    elif rng.random() < 0.5:
        count = int(rng.integers(1, max(2, len(names) // 2)))
        frozen = set(rng.permutation(names)[:count].tolist())
        trained = [n for n in names if n not in frozen]
    slow: tuple[str, ...] = ()
    if trained and rng.random() < 0.2:
        slow = (pick(trained),)
    schedule = pick(
        (
            {},
            {},
            {"name": "exponential", "gamma": 0.9},
            {"name": "exponential", "gamma": 0.5, "by": "epoch"},
            {"name": "cosine", "period": 20},
            {"name": "polynomial", "length": 30, "power": 2.0},
            {"name": "warmup", "length": 3, "start": 0.25},
            {"name": "step", "size": 3, "gamma": 0.5},
        )
    )
    penalty = pick(({}, {}, {"l2": 0.02}, {"l1": 0.003}, {"l1": 0.002, "l2": 0.01}))
    transforms = pick(({}, {}, {"clip_value": 0.05}, {"clip_norm": 0.3}, {"centralize": 1.0}))
    if kind == "block" and "centralize" in transforms:  # a table that is also a matrix
        transforms = {}
    averaging = pick(({}, {}, {"decay": 0.7}, {"start": 2.0, "every": 2.0}))
    return Recipe(
        number=number,
        kind=kind,
        activation=pick(ACTIVATIONS),
        network=network,
        loss=loss,
        optimizer=pick(sorted(OPTIMIZERS)),
        schedule=schedule,
        penalty=penalty,
        transforms=transforms,
        averaging=averaging,
        trained=tuple(trained),
        slow=slow,
        adapters=adapters,
        rank=rank,
        alpha=float(rng.integers(1, 4)),
        norm="freeze" if adapters or rng.random() < 0.3 else "train",
        accumulate=accumulate,
        batch=batch,
        epochs=int(rng.integers(2, 4)),
        data=data,
        label=label,
        weight=weight,
    )


def model_of(recipe: Recipe) -> onnx.ModelProto:
    inputs = ", ".join(
        f"{dtype}[{', '.join(['N', *map(str, shape)])}] {name}"
        for name, (dtype, shape) in recipe.network.inputs.items()
    )
    nodes = recipe.network.nodes.replace("act (", f"{recipe.activation} (")
    proto = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net ({inputs}) => (float[N, K] Y) {{ {nodes} }}'
    )
    for name, array in {**recipe.network.weights, **recipe.network.constants}.items():
        proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return proto


def arguments_of(recipe: Recipe) -> dict[str, Any]:
    settings = dict(OPTIMIZERS[recipe.optimizer])
    rate = settings.pop("rate")
    out: dict[str, Any] = {
        "loss": {"cross_entropy": "softmax_cross_entropy"}.get(recipe.loss, recipe.loss),
        "optimizer": {"name": recipe.optimizer, **settings},
        "learning_rate": rate,
        "batch_norm": recipe.norm,
        "accumulate": recipe.accumulate,
        "batch_size": recipe.batch,
        "epochs": recipe.epochs,
        "shuffle": False,
        "threads": 1,
    }
    if recipe.schedule:
        out["schedule"] = dict(recipe.schedule)
    if recipe.penalty:
        kind = "elastic" if len(recipe.penalty) > 1 else next(iter(recipe.penalty))
        out["penalty"] = {"name": kind, **recipe.penalty}
    for name, value in recipe.transforms.items():
        if name == "centralize":
            out["transforms"] = ["centralize"]
        else:
            out[name] = value
    if recipe.averaging:
        out["averaging"] = {
            "name": "ema" if "decay" in recipe.averaging else "swa",
            **recipe.averaging,
        }
    if recipe.adapters:
        targets = sorted({name.split(".")[0] for name in recipe.adapters})
        out["adapters"] = {
            "name": "lora",
            "rank": recipe.rank,
            "alpha": recipe.alpha,
            "targets": targets,
        }
    else:
        out["params"] = list(recipe.trained)
    if recipe.slow:
        out["groups"] = [{"params": list(recipe.slow), "rate": 0.25}]
    return out
