"""What the formulas must compute, written a second time: numpy, float64, one row after another.

Independent on purpose: nothing here comes from ortflex, and the textbook form is taken where the
plugins take a rearranged one (log(1 + eˢ) by logaddexp, bias corrections on the tensors).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


# Losses: values of shape [B, …] ----------------------------------------------------------------


def squared_error(p: Array, y: Array) -> Array:
    return np.square(p - y)


def absolute_error(p: Array, y: Array) -> Array:
    return np.abs(p - y)


def elastic(p: Array, y: Array, l1_weight: float = 0.5, l2_weight: float = 0.5) -> Array:
    return l1_weight * np.abs(p - y) + l2_weight * np.square(p - y)


def huber(p: Array, y: Array, delta: float = 1.0) -> Array:
    e = np.abs(p - y)
    return np.where(e <= delta, e**2 / 2, delta * (e - delta / 2))


def log_loss(s: Array, y: Array) -> Array:
    # −y·log σ(s) − (1 − y)·log(1 − σ(s))
    return y * np.logaddexp(0, -s) + (1 - y) * np.logaddexp(0, s)


def log_softmax(s: Array, axis: int = 1) -> Array:
    top = s.max(axis=axis, keepdims=True)
    return s - top - np.log(np.exp(s - top).sum(axis=axis, keepdims=True))


def softmax_cross_entropy(s: Array, y: Array, ignore_index: int | None = -100) -> Array:
    logs = log_softmax(s)
    if y.ndim == s.ndim:
        return -(y * logs).sum(axis=1)
    out = np.zeros(y.shape)
    for place in np.ndindex(y.shape):
        if y[place] != ignore_index:
            out[place] = -logs[(place[0], y[place], *place[1:])]
    return out


# Penalties: the cost of every element ------------------------------------------------------------


def l1(w: Array, l1: float = 1e-4) -> Array:
    return l1 * np.abs(w)


def l2(w: Array, l2: float = 1e-4) -> Array:
    return l2 * np.square(w)


def elastic_penalty(w: Array, l1: float = 1e-4, l2: float = 1e-4) -> Array:
    return l1 * np.abs(w) + l2 * np.square(w)


# Optimizers: (w, g, rate, t ≥ 1, slots) → (w, slots) ---------------------------------------------

Slots = dict[str, Array]


def sgd(w: Array, g: Array, rate: float, t: int, slots: Slots) -> tuple[Array, Slots]:
    return w - rate * g, {}


def momentum(
    w: Array, g: Array, rate: float, t: int, slots: Slots, beta: float = 0.9
) -> tuple[Array, Slots]:
    v = beta * slots["velocity"] + g
    return w - rate * v, {"velocity": v}


def nesterov(
    w: Array, g: Array, rate: float, t: int, slots: Slots, beta: float = 0.9
) -> tuple[Array, Slots]:
    v = beta * slots["velocity"] + g
    return w - rate * (g + beta * v), {"velocity": v}


def _moments(
    g: Array, t: int, slots: Slots, beta1: float = 0.9, beta2: float = 0.999
) -> tuple[Array, ...]:
    m = beta1 * slots["m"] + (1 - beta1) * g
    v = beta2 * slots["v"] + (1 - beta2) * g**2
    return m, v, m / (1 - beta1**t), v / (1 - beta2**t)


def adam(
    w: Array, g: Array, rate: float, t: int, slots: Slots, *, eps: float = 1e-8, **betas: float
) -> tuple[Array, Slots]:
    m, v, m_hat, v_hat = _moments(g, t, slots, **betas)
    return w - rate * m_hat / (np.sqrt(v_hat) + eps), {"m": m, "v": v}


def adamw(
    w: Array,
    g: Array,
    rate: float,
    t: int,
    slots: Slots,
    weight_decay: float = 0.01,
    **of_adam: float,
) -> tuple[Array, Slots]:
    return adam(w - rate * weight_decay * w, g, rate, t, slots, **of_adam)


def lamb(
    w: Array,
    g: Array,
    rate: float,
    t: int,
    slots: Slots,
    *,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    ratio_min: float = 0.0,
    ratio_max: float = 10.0,
    **betas: float,
) -> tuple[Array, Slots]:
    m, v, m_hat, v_hat = _moments(g, t, slots, **betas)
    d = m_hat / (np.sqrt(v_hat) + eps) + weight_decay * w
    size_w, size_d = np.linalg.norm(w.ravel()), np.linalg.norm(d.ravel())
    ratio = 1.0
    if size_w > 0 and size_d > 0:
        ratio = float(np.clip(size_w / size_d, ratio_min, ratio_max))
    return w - rate * ratio * d, {"m": m, "v": v}


def adafactor(
    w: Array,
    g: Array,
    rate: float,
    t: int,
    slots: Slots,
    beta2_decay: float = -0.8,
    eps1: float = 2.0**-23,
    eps2: float = 1e-3,
    clip: float = 1.0,
    weight_decay: float = 0.0,
) -> tuple[Array, Slots]:
    beta2 = 1 - t**beta2_decay
    if w.ndim > 1:
        row = beta2 * slots["row"] + (1 - beta2) * (g**2).mean(axis=-1, keepdims=True)
        column = beta2 * slots["column"] + (1 - beta2) * (g**2).mean(axis=-2, keepdims=True)
        v = row * column / np.maximum(row.mean(axis=-2, keepdims=True), eps1)
        slots = {"row": row, "column": column}
    else:
        v = beta2 * slots["variance"] + (1 - beta2) * g**2
        slots = {"variance": v}
    d = g / np.maximum(np.sqrt(v), eps1)
    d = d / max(1, np.sqrt((d**2).mean()) / clip)
    size = max(eps2, float(np.sqrt((w**2).mean()))) * min(rate, t**-0.5)
    return w - rate * weight_decay * w - size * d, slots


# Derivatives -------------------------------------------------------------------------------------


def central_differences(f: Callable[[Array], Any], x: Array, h: float = 1e-6) -> Array:
    """d Σf / dx, one element after another; at a kink the mean of both sides."""
    x = np.array(x, dtype=np.float64)
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += h
        down[place] -= h
        # The difference before the sum: a sum of large values would drown it.
        out[place] = (np.asarray(f(up)) - np.asarray(f(down))).sum() / (up[place] - down[place])
    return out
