"""The networks of tests/models.py once more, in numpy and float64, with gradients by hand.

Nothing here comes from ortflex. Every network also says how near it is to a tie: the smallest
distance of a relu's argument from zero, or of a maximum from the second largest. There a rounding
error flips a branch, and two right programs differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]


@attrs.frozen
class Step:
    """Loss and penalty of a batch, the gradient of their sum, and the distance from a tie."""

    loss: float
    penalty: float
    gradients: Weights
    margin: float


@attrs.frozen(kw_only=True)
class Recipe:
    """``Σ w·l / Σ w + Σ (l1·|v| + l2·v²)`` on a network."""

    net: Any
    l1: float = 0.0
    l2: float = 0.0

    def step(self, weights: Weights, x: Array, y: Array, w: Array) -> Step:
        """One batch, in float64."""
        here = {n: a.astype(np.float64) for n, a in weights.items()}
        predicted, keep, margin = self.net.forward(here, x.astype(np.float64))
        values, pull = self.net.cost(predicted, y)
        w = w.reshape(-1, *([1] * (values.ndim - 1))) + np.zeros_like(values)
        below = w.sum()
        scale = w / below if below else np.zeros_like(w)
        loss = float((scale * values).sum())
        shape = scale.reshape(*scale.shape, *([1] * (pull.ndim - scale.ndim)))
        found = self.net.backward(here, keep, shape * pull)
        penalty = sum(float((self.l1 * abs(v) + self.l2 * v * v).sum()) for v in here.values())
        total = {n: found[n] + self.l1 * np.sign(v) + 2 * self.l2 * v for n, v in here.items()}
        if self.l1:
            margin = min(margin, *(float(abs(v).min()) for v in here.values()))
        return Step(loss, penalty, total, margin)


class Dense:
    """``mlp`` (and ``linear`` as its smallest) with squared error."""

    def __init__(self, names: list[tuple[str, str]], activation: str = "Tanh") -> None:
        self.names, self.activation = names, activation

    def forward(self, weights: Weights, x: Array) -> tuple[Array, Any, float]:
        keep, margin = [], np.inf
        for k, (matrix, bias) in enumerate(self.names, start=1):
            z = x @ weights[matrix] + weights[bias]
            keep.append((x, z))
            if k == len(self.names):
                return z, keep, margin
            if self.activation == "Relu":
                margin = min(margin, float(abs(z).min()))
                x = np.maximum(z, 0)
            else:
                x = np.tanh(z)
        raise AssertionError

    def cost(self, predicted: Array, y: Array) -> tuple[Array, Array]:
        return (predicted - y) ** 2, 2 * (predicted - y)

    def backward(self, weights: Weights, keep: Any, g: Array) -> Weights:
        out = {}
        for (matrix, bias), (x, z) in zip(reversed(self.names), reversed(keep), strict=True):
            if (matrix, bias) != self.names[-1]:
                g = g * ((z > 0) if self.activation == "Relu" else 1 - np.tanh(z) ** 2)
            out[matrix], out[bias] = x.T @ g, g.sum(axis=0)
            g = g @ weights[matrix].T
        return out


class Convolution:
    """``conv_net`` with the cross-entropy of softmax."""

    def forward(self, weights: Weights, x: Array) -> tuple[Array, Any, float]:
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
        z = np.einsum("nchwkl,ockl->nohw", windows, weights["kernel"])
        z = z + weights["bias"][:, None, None]
        n, c, h, w = z.shape
        cells = z.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 1, 2, 4, 3, 5)
        cells = cells.reshape(n, c, h // 2, w // 2, 4)
        ordered = np.sort(np.maximum(cells, 0), axis=-1)
        flat = ordered[..., -1].reshape(n, -1)
        # Two cells that relu has set to zero are no tie that matters: neither passes a gradient.
        gap = np.where(ordered[..., -1] > 0, ordered[..., -1] - ordered[..., -2], np.inf)
        margin = min(float(abs(z).min()), float(gap.min()))
        return flat @ weights["full"] + weights["shift"], (windows, cells, flat), margin

    def cost(self, predicted: Array, y: Array) -> tuple[Array, Array]:
        top = predicted - predicted.max(axis=1, keepdims=True)
        logs = top - np.log(np.exp(top).sum(axis=1, keepdims=True))
        hot = np.eye(predicted.shape[1])[y]
        return -(hot * logs).sum(axis=1), np.exp(logs) - hot

    def backward(self, weights: Weights, keep: Any, g: Array) -> Weights:
        windows, cells, flat = keep
        out = {"full": flat.T @ g, "shift": g.sum(axis=0)}
        n, c, h, w, _ = cells.shape
        below = (g @ weights["full"].T).reshape(n, c, h, w, 1)
        best = cells == cells.max(axis=-1, keepdims=True)
        spread = np.where(best & (cells > 0), below, 0.0)
        z = spread.reshape(n, c, h, w, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, c, 2 * h, 2 * w)
        out["kernel"] = np.einsum("nchwkl,nohw->ockl", windows, z)
        out["bias"] = z.sum(axis=(0, 2, 3))
        return out


def rounded(weights: Mapping[str, Array]) -> Weights:
    """As a float32 program would hold them."""
    return {n: a.astype(np.float32) for n, a in weights.items()}
