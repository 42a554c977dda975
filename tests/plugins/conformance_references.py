"""What every plugin of ours computes, in numpy: the references of the conformance kits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from ortflex_core import Array
from ortflex_core.testing import running
from tests import models, oracles

Reference = Callable[..., Any]
Slots = Mapping[str, Array]


def focal(s: Array, y: Array, alpha: float, gamma: float) -> Array:
    p = 1 / (1 + np.exp(-s))
    surprise = y * alpha * (1 - p) ** gamma + (1 - y) * (1 - alpha) * p**gamma
    return surprise * oracles.log_loss(s, y)


def pairs(p: Array, y: Array, margin: float) -> Array:
    a, b = p[:, 0], p[:, 1]
    squares = ((a**2).sum(axis=1) + 1e-12) * ((b**2).sum(axis=1) + 1e-12)
    cosine = (a * b).sum(axis=1) / np.sqrt(squares)
    return np.where(y > 0, 1 - cosine, np.maximum(0, cosine - margin))


def dice(s: Array, y: Array, smooth: float) -> Array:
    p = 1 / (1 + np.exp(-s))
    above = 2 * (p * y).sum(axis=1) + smooth
    return 1 - above / (p.sum(axis=1) + y.sum(axis=1) + smooth)


def kullback_leibler(s: Array, y: Array) -> Array:
    logs = np.log(np.maximum(y, 1e-300))
    return (y * (logs - oracles.log_softmax(s))).sum(axis=1)


def entropy(s: Array, y: Array | None) -> Array:
    logs = oracles.log_softmax(s)
    return -(np.exp(logs) * logs).sum(axis=1)


def causal_lm(s: Array, y: Array) -> Array:
    logs = oracles.log_softmax(s, -1)[:, :-1]
    tokens = y[:, 1:]
    picked = np.take_along_axis(logs, np.maximum(tokens, 0)[..., None], -1)[..., 0]
    return np.where(tokens == -100, 0, -picked)


def triplet(read: Mapping[str, Array], y: Any, margin: float) -> Array:
    near, far = (
        np.sqrt(np.square(read["anchor"] - read[other] + 1e-6).sum(1))
        for other in ("positive", "negative")
    )
    return np.maximum(near - far + margin, 0)


def _cosines(a: Array, b: Array) -> Array:
    lengths = [np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (a, b)]
    return (a / lengths[0]) @ (b / lengths[1]).T


def margin_softmax(read: Mapping[str, Array], y: Array, scale: float) -> Array:
    cosines = _cosines(read["embedding"], read["weight"])
    moved = cosines * np.cos(0.5) - np.sqrt(np.maximum(1 - cosines**2, 1e-9)) * np.sin(0.5)
    own = y[:, None] == np.arange(cosines.shape[1])
    return -oracles.log_softmax(scale * np.where(own, moved, cosines))[own]


def contrastive(read: Mapping[str, Array], y: Any, temperature: float) -> Array:
    s = _cosines(read["anchor"], read["positive"]) / temperature
    return -(np.diag(oracles.log_softmax(s)) + np.diag(oracles.log_softmax(s, 0))) / 2


LOSSES: dict[str, Reference] = {
    "triplet": triplet,
    "margin_softmax": margin_softmax,
    "contrastive": contrastive,
    "causal_lm": causal_lm,
    "squared_error": oracles.squared_error,
    "absolute_error": oracles.absolute_error,
    "elastic": oracles.elastic,
    "huber": oracles.huber,
    "log_loss": oracles.log_loss,
    "softmax_cross_entropy": oracles.softmax_cross_entropy,
    "quantile": lambda p, y, quantile: np.where(
        y > p, quantile * (y - p), (1 - quantile) * (p - y)
    ),
    "poisson": lambda p, y: np.exp(p) - y * p,
    "log_cosh": lambda p, y: np.logaddexp(p - y, y - p) - np.log(2),
    "hinge": lambda p, y: np.maximum(0, 1 - y * p),
    "squared_hinge": lambda p, y: np.maximum(0, 1 - y * p) ** 2,
    "focal": focal,
    "entropy": entropy,
    "cosine_embedding": pairs,
    "dice": dice,
    "kullback_leibler": kullback_leibler,
    "example_cauchy": lambda p, y, scale: np.log1p(((p - y) / scale) ** 2),
}


def group_lasso(w: Array, factor: float, axis: int | None = 0, by_size: bool = True) -> Array:
    rows = w.reshape(1, -1) if axis is None else np.moveaxis(w, axis, 0).reshape(w.shape[axis], -1)
    return factor * np.linalg.norm(rows, axis=1) * (np.sqrt(rows.shape[1]) if by_size else 1)


PENALTIES: dict[str, Reference] = {
    "none": lambda w: np.zeros_like(w),
    "l1": oracles.l1,
    "l2": oracles.l2,
    "elastic": oracles.elastic_penalty,
    "group_lasso": group_lasso,
    "example_smooth": lambda w, factor, width: factor * np.sqrt(w**2 + width**2),
}


def max_norm(w: Array, bound: float, axis: int = -1) -> Array:
    rest = tuple(k for k in range(w.ndim) if k != axis % w.ndim)
    norm = np.sqrt((w**2).sum(axis=rest, keepdims=True))
    return w * np.minimum(1, bound / np.maximum(norm, 1e-12))


def sparsity(w: Array, **_: Any) -> Array:
    order = np.argsort(np.abs(w).ravel(), kind="stable")
    out = w.astype(np.float64).ravel()
    out[order[: min(round(0.5 * w.size), w.size - 1)]] = 0
    return out.reshape(w.shape)


CONSTRAINTS: dict[str, Reference] = {
    "non_negative": lambda w: np.maximum(w, 0),
    "max_norm": max_norm,
    "sparsity": sparsity,
    "example_at_most": lambda w, bound: np.minimum(w, bound),
}


# Edits: (before, after, x) -> the first output -----------------------------------------------------


def other_head(before: Slots, after: Slots, x: Array) -> Array:
    assert after["W2"].shape == (4, 3)
    assert np.abs(after["W2"]).max() <= 0.5  # 1/√4
    return np.asarray(np.tanh(x @ before["W1"] + before["b1"]) @ after["W2"] + after["b2"])


def more_classes(before: Slots, after: Slots, x: Array) -> Array:
    new = {n: after[n][..., -2:] for n in ("W2", "b2")}
    hidden = np.tanh(x @ before["W1"] + before["b1"])
    columns = (hidden @ w["W2"] + w["b2"] for w in (before, new))
    return np.concatenate(list(columns), axis=1)


def more_tokens(before: Slots, after: Slots, x: Array) -> Array:
    table = np.concatenate([before["table"], after["table"][-2:]])
    np.testing.assert_allclose(table[-2:], np.tile(before["table"].mean(axis=0), (2, 1)), atol=1e-3)
    return np.asarray(table[x] @ table.T)


def pruned(before: Any, after: Any, x: Any) -> Any:
    w1, w2 = (np.where(np.abs(before[n]) < 0.1, 0, before[n]) for n in ("W1", "W2"))
    return np.tanh(x @ w1 + before["b1"]) @ w2 + before["b2"]


EDITS: dict[str, Reference] = {
    "example_prune": pruned,
    "new_head": other_head,
    "more_classes": more_classes,
    "cut": lambda before, after, x: np.tanh(x @ before["W1"] + before["b1"]),
    "more_tokens": more_tokens,
    "shrink": lambda before, after, x: (
        np.tanh(x @ before["W1"] + before["b1"]) @ before["W2"] + before["b2"]
    ),
}


def edited_model(component: Any) -> onnx.ModelProto:
    """The model for an edit: a network, or a tied language model ``Y = table[X] · tableᵀ``."""
    if component.name != "more_tokens":
        return running.network_model()
    table = np.random.default_rng(2).standard_normal((6, 4)).astype(np.float32)
    nodes = "h = Gather(table, X) turned = Transpose<perm = [1, 0]>(table) Y = MatMul(h, turned)"
    return models.parsed(nodes, {"table": table}, "int64[N, 5] X", "float[N, 5, 6] Y")


# Quantizers: (values, codes, symmetric) -> the lowest and the highest number ------------------------


def percentile(values: Array, codes: Any, symmetric: bool) -> Any:
    rows = np.sort(values, axis=1)
    place = np.array([0.0001, 0.9999]) * (rows.shape[1] - 1)
    whole = place.astype(int)
    ends = rows[:, whole] + (rows[:, np.minimum(whole + 1, rows.shape[1] - 1)] - rows[:, whole]) * (
        place - whole
    )
    return ends[:, 0], ends[:, 1]


def rounded(x: Array, low: float, high: float, codes: Any, symmetric: bool) -> Array:
    """Fake quantization in float64, by the nearest of all values that the codes stand for."""
    low, high = min(low, 0.0), max(high, 0.0)
    levels = np.arange(codes[0], codes[1] + 1)
    if symmetric:
        zero = (codes[0] + codes[1] + 1) // 2
        scale = max(-low / (zero - codes[0]), high / (codes[1] - zero))
    else:
        scale = (high - low) / (codes[1] - codes[0])
        zero = np.clip(np.rint(codes[0] - low / scale), *codes)
    grid = (levels - zero) * float(np.float32(scale))
    return np.asarray(grid[np.abs(x[:, None] - grid).argmin(axis=1)])


def least_error(values: Array, codes: Any, symmetric: bool) -> Any:
    shares = []
    for row in values:
        tried = np.arange(100, 19, -1) / 100
        errors = [
            np.sum((rounded(row, row.min() * c, row.max() * c, codes, symmetric) - row) ** 2)
            for c in tried
        ]
        shares.append(tried[int(np.argmin(errors))])
    return values.min(1) * shares, values.max(1) * shares


def least_divergence(values: Array, codes: Any, symmetric: bool) -> Any:
    levels, out = codes[1] - codes[0] + 1, []
    for row in values:
        low, high = min(row.min(), 0.0), max(row.max(), 0.0)
        costs = []
        for c in np.arange(100, 19, -1) / 100:
            edges = np.linspace(low * c, high * c, 2049)
            inside = row[(row >= edges[0]) & (row <= edges[-1])]
            p = np.histogram(np.clip(row, edges[0], edges[-1]), edges)[0]
            kept = np.histogram(inside, edges)[0]
            q = np.zeros(2048)
            for level in range(levels):
                own = np.arange(2048) * levels // 2048 == level
                used = own & (p > 0)
                if used.any():
                    q[used] = kept[own].sum() / used.sum()
            q = np.maximum(q / q.sum(), 1e-12)
            costs.append(
                sum(a / p.sum() * np.log(a / p.sum() / b) for a, b in zip(p, q, strict=True) if a)
            )
        out.append(np.arange(100, 19, -1)[int(np.argmin(costs))] / 100)
    return np.minimum(values.min(1), 0) * out, np.maximum(values.max(1), 0) * out


QUANTIZERS: dict[str, Reference] = {
    "minmax": lambda x, codes, symmetric: (x.min(1), x.max(1)),
    "percentile": percentile,
    "mse": least_error,
    "entropy": least_divergence,
    "example_deviations": lambda x, codes, symmetric: (
        x.mean(1) - 3 * x.std(1),
        x.mean(1) + 3 * x.std(1),
    ),
}


# Adapters: (x, matrix, tensors) -> x·M with the adapter ---------------------------------------------


def lora(x: Array, matrix: Array, tensors: Slots) -> Array:
    return np.asarray(x @ matrix + 2.0 * (x @ tensors["lora_A"]) @ tensors["lora_B"])


def example_column(x: Array, matrix: Array, tensors: Slots) -> Array:
    return np.asarray(x @ (matrix + tensors["column"] * tensors["row"]))


ADAPTERS: dict[str, Reference] = {"lora": lora, "example_column": example_column}


# Transforms: (gradients, given) -> gradients ------------------------------------------------------


def clip_norm(gradients: Slots, given: Any, bound: float) -> Slots:
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    return {n: g * min(1.0, bound / (norm + 1e-6)) for n, g in gradients.items()}


def centralize(gradients: Slots, given: Any) -> Slots:
    out = dict(gradients)
    for name, (axis,) in given.output_axes.items():
        rows = np.moveaxis(gradients[name], axis, 0)
        means = rows.reshape(len(rows), -1).mean(axis=1)
        out[name] = np.moveaxis(rows - means.reshape(-1, *[1] * (rows.ndim - 1)), 0, axis)
    return out


def words(label: str, step: int, count: int) -> Array:
    """Widynski's squares with five rounds and a sum in place of the last ⊕, as uint64."""
    digest = hashlib.sha256(label.encode()).digest()
    key = np.uint64(int.from_bytes(digest[:8], "little") | 1)
    half = np.uint64(32)

    def swapped(x: Array) -> Array:
        return (x << half) | (x >> half)

    y = (np.uint64(step << 32) + np.arange(count, dtype=np.uint64)) * key
    z = y + key
    x = swapped(y * y + y)
    x = swapped(x * x + z)
    x = swapped(x * x + y)
    t = x * x + z
    x = swapped(t)
    return np.asarray(t + ((x * x + y) >> half))


def normal(seed: int, name: str, step: int, shape: tuple[int, ...]) -> Array:
    drawn = words(f"normal/{seed}/{name}", step, math.prod(shape))
    halves = drawn >> np.uint64(32), drawn & np.uint64(2**32 - 1)
    high, low = ((half.astype(np.float64) + 0.5) / 2**32 for half in halves)
    return (np.sqrt(-2 * np.log(high)) * np.sin(2 * np.pi * low)).reshape(shape)


def noise(gradients: Slots, given: Any, eta: float, gamma: float) -> Slots:
    deviation = math.sqrt(eta / given.step**gamma)
    return {
        n: g + deviation * normal(given.seed, n, given.step, g.shape) for n, g in gradients.items()
    }


TRANSFORMS: dict[str, Reference] = {
    "clip_value": lambda g, given, bound: {n: np.clip(a, -bound, bound) for n, a in g.items()},
    "clip_norm": clip_norm,
    "centralize": centralize,
    "noise": noise,
    "example_power": lambda g, given, power: {
        n: np.sign(a) * np.abs(a) ** power for n, a in g.items()
    },
}


def swa(a: Array, w: Array, t: int, start: float, every: float) -> Array:
    if t < start:
        return w
    n, off = divmod(t - start, every)
    return a if off else a + (w - a) / (n + 1)


AVERAGES: dict[str, Reference] = {
    "ema": lambda a, w, t, decay: w if t == 1 else decay * a + (1 - decay) * w,
    "swa": swa,
    "example_halfway": lambda a, w, t: (a + w) / 2,
}


# Optimizers: (w, g, rate, t, slots) -> (w, slots) ------------------------------------------------


def named(given: Mapping[str, float], *names: str) -> list[float]:
    """Hyperparameters in an order; no other ones may be given."""
    assert given.keys() == set(names)
    return [given[name] for name in names]


def adagrad(
    w: Array, g: Array, rate: float, t: int, s: Slots, rate_decay: float, eps: float
) -> Any:
    total = s["s"] + g**2
    return w - rate / (1 + (t - 1) * rate_decay) * g / (np.sqrt(total) + eps), {"s": total}


def rmsprop(w: Array, g: Array, rate: float, t: int, s: Slots, alpha: float, eps: float) -> Any:
    v = alpha * s["v"] + (1 - alpha) * g**2
    return w - rate * g / (np.sqrt(v) + eps), {"v": v}


def adadelta(w: Array, g: Array, rate: float, t: int, s: Slots, rho: float, eps: float) -> Any:
    v = rho * s["v"] + (1 - rho) * g**2
    d = g * np.sqrt(s["u"] + eps) / np.sqrt(v + eps)
    return w - rate * d, {"v": v, "u": rho * s["u"] + (1 - rho) * d**2}


def adamax(
    w: Array, g: Array, rate: float, t: int, s: Slots, beta1: float, beta2: float, eps: float
) -> Any:
    m = beta1 * s["m"] + (1 - beta1) * g
    u = np.maximum(beta2 * s["u"], abs(g) + eps)
    return w - rate / (1 - beta1**t) * m / u, {"m": m, "u": u}


def nadam(w: Array, g: Array, rate: float, t: int, s: Slots, **given: float) -> Any:
    beta1, beta2, eps, decay = named(given, "beta1", "beta2", "eps", "decay")
    mu = [beta1 * (1 - 0.5 * 0.96 ** (k * decay)) for k in range(t + 2)]
    m = beta1 * s["m"] + (1 - beta1) * g
    v = beta2 * s["v"] + (1 - beta2) * g**2
    product = math.prod(mu[1 : t + 1])
    move = (1 - mu[t]) * g / (1 - product) + mu[t + 1] * m / (1 - product * mu[t + 1])
    return w - rate * move / (np.sqrt(v / (1 - beta2**t)) + eps), {"m": m, "v": v}


def radam(
    w: Array, g: Array, rate: float, t: int, s: Slots, beta1: float, beta2: float, eps: float
) -> Any:
    m = beta1 * s["m"] + (1 - beta1) * g
    v = beta2 * s["v"] + (1 - beta2) * g**2
    limit = 2 / (1 - beta2) - 1
    rho = limit - 2 * t * beta2**t / (1 - beta2**t)
    move = m / (1 - beta1**t)
    if rho > 5:
        r = np.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))
        move = move * r * np.sqrt(1 - beta2**t) / (np.sqrt(v) + eps)
    return w - rate * move, {"m": m, "v": v}


def lion(w: Array, g: Array, rate: float, t: int, s: Slots, **given: float) -> Any:
    beta1, beta2, weight_decay = named(given, "beta1", "beta2", "weight_decay")
    move = np.sign(beta1 * s["m"] + (1 - beta1) * g)
    return w - rate * (move + weight_decay * w), {"m": beta2 * s["m"] + (1 - beta2) * g}


def example_rmsprop(
    w: Array, g: Array, rate: float, t: int, s: Slots, decay: float, eps: float
) -> Any:
    square = decay * s["square"] + (1 - decay) * g**2
    return w - rate * g / (np.sqrt(square) + eps), {"square": square}


def lars(w: Array, g: Array, rate: float, t: int, s: Slots, **given: float) -> Any:
    beta, trust, weight_decay = named(given, "beta", "trust", "weight_decay")
    lengths = np.linalg.norm(w.ravel()), np.linalg.norm(g.ravel())
    local = trust * lengths[0] / (lengths[1] + weight_decay * lengths[0]) if all(lengths) else 1.0
    v = beta * s["velocity"] + rate * local * (g + weight_decay * w)
    return w - v, {"velocity": v}


def prodigy(w: Array, g: Array, rate: float, t: int, s: Slots, **given: float) -> Any:
    beta1, beta2, eps, d0 = named(given, "beta1", "beta2", "eps", "d0")
    root, start = math.sqrt(beta2), w if t == 1 else s["start"]
    size = np.abs(s["s"]).sum()
    d = max(float(s["d"]), d0, float(s["r"]) / size if size else 0.0)
    m = beta1 * s["m"] + (1 - beta1) * d * g
    v = beta2 * s["v"] + (1 - beta2) * (d * g) ** 2
    after = {
        "m": m,
        "v": v,
        "s": root * s["s"] + (1 - root) * rate * d**2 * g,
        "start": start,
        "d": np.asarray(d),
        "r": root * s["r"] + (1 - root) * rate * d**2 * (g * (start - w)).sum(),
    }
    return w - rate * d * m / (np.sqrt(v) + d * eps), after


OPTIMIZERS: dict[str, Reference] = {
    "sgd": oracles.sgd,
    "momentum": oracles.momentum,
    "nesterov": oracles.nesterov,
    "adam": oracles.adam,
    "adamw": oracles.adamw,
    "lamb": oracles.lamb,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "adadelta": adadelta,
    "adamax": adamax,
    "nadam": nadam,
    "radam": radam,
    "lion": lion,
    "lars": lars,
    "adafactor": oracles.adafactor,
    "prodigy": prodigy,
    "example_rmsprop": example_rmsprop,
}


# Schedules: (base, t, total) -> rate -------------------------------------------------------------


def cosine_restarts(base: float, t: int, total: int) -> float:
    return base * 0.5 * (1 + math.cos(math.pi * (t % 10) / 10))


def one_cycle(base: float, t: int, total: int) -> float:
    first, top = base / 25, 0.3 * total - 1
    if t <= top:
        return first + (base - first) * (1 - math.cos(math.pi * t / top)) / 2
    last = first / 1e4
    share = (t - top) / (total - 1 - top)
    return last + (base - last) * (1 + math.cos(math.pi * share)) / 2


SCHEDULES: dict[str, Reference] = {
    "constant": lambda base, t, total: base,
    "invscaling": lambda base, t, total: base / (t + 1) ** 0.25,
    "step": lambda base, t, total: base * 0.1 ** (t // 10),
    "exponential": lambda base, t, total: base * 0.99**t,
    "cosine": lambda base, t, total: base * (1 + math.cos(math.pi * t / total)) / 2,
    "warmup": lambda base, t, total: base * min(1, (1 + 2 * t / 5) / 3),
    "multi_step": lambda base, t, total: base * 0.1 ** ((t >= 3) + (t >= 5)),
    "polynomial": lambda base, t, total: base * (1 - t / total),
    "cosine_restarts": cosine_restarts,
    "one_cycle": one_cycle,
    "plateau": lambda base, t, total: base,  # nothing was seen to stop improving
    "sequential": lambda base, t, total: (
        base * (min(1, (1 + 2 * t / 3) / 3) if t < 5 else 0.99 ** (t - 5))
    ),
    "chained": lambda base, t, total: base * 0.99**t * 0.1 ** (t // 4),
    # Bottou: τ = alpha^(−¼) = 10, slope(−10, 1) = −22, so that max(1, slope) is 1.
    "optimal": lambda base, t, total: 1 / (1e-4 * (1 / (10 * 1e-4) + t)),
    "example_sawtooth": lambda base, t, total: base * (1 - (t % 10) / 20),
}


# Metrics: (expected, predicted, weight) -> value -------------------------------------------------


def r2(y: Array, p: Array, w: Array) -> float:
    w = w.reshape(-1, *[1] * (y.ndim - 1))
    mean = (w * y).sum() / w.sum()
    return float(1 - (w * (y - p) ** 2).sum() / (w * (y - mean) ** 2).sum())


def top_2(y: Array, p: Array, w: Array) -> float:
    larger = (p > p[np.arange(len(y)), y][:, None]).sum(axis=1)
    return float(np.average(larger < 2, weights=w))


def f1(y: Array, p: Array, w: Array) -> float:
    found, each = p.argmax(axis=1), []
    for c in range(3):
        right = w[(y == c) & (found == c)].sum()
        each.append(2 * right / (w[y == c].sum() + w[found == c].sum()))
    return float(np.mean(each))


def roc_auc(y: Array, p: Array, w: Array) -> float:
    each = []
    for c in range(3):
        ahead = np.sign(p[y == c, c][:, None] - p[y != c, c]) / 2 + 0.5
        pairs = w[y == c][:, None] * w[y != c]
        each.append((ahead * pairs).sum() / pairs.sum())
    return float(np.mean(each))


METRICS: dict[str, Reference] = {
    "token_accuracy": lambda y, p, w: np.average(
        (p.argmax(-1)[:, :-1] == y[:, 1:]).mean(1), weights=w
    ),
    "perplexity": lambda y, p, w: np.exp(np.average(causal_lm(p, y).mean(1), weights=w)),
    "accuracy": lambda y, p, w: np.average(y == p.argmax(axis=1), weights=w),
    "mae": lambda y, p, w: np.average(abs(y - p)[:, 0], weights=w),
    "rmse": lambda y, p, w: np.sqrt(np.average(((y - p) ** 2)[:, 0], weights=w)),
    "r2": r2,
    "top_k": top_2,
    "f1": f1,
    "roc_auc": roc_auc,
    "sklearn": lambda y, p, w: np.average(abs(y - p)[:, 0], weights=w),
    "example_worst": lambda y, p, w: abs(y - p).max(),
}

ALL: dict[str, dict[str, Reference]] = {
    "losses": LOSSES,
    "penalties": PENALTIES,
    "edits": EDITS,
    "quantizers": QUANTIZERS,
    "adapters": ADAPTERS,
    "transforms": TRANSFORMS,
    "constraints": CONSTRAINTS,
    "averages": AVERAGES,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
    "metrics": METRICS,
}
