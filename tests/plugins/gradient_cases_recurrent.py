"""Cases of RNN, GRU and LSTM; the oracle is the standard's equations, step by step in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ortflex_core import Array
from tests.gradcheck import data
from tests.plugins.gradient_cases import Case, case

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
Cell = Callable[..., tuple[Array, Array]]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rnn(x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array) -> Any:
    return np.tanh(x @ w.T + h @ r.T + wb + rb), c


def relu_rnn(x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array) -> Any:
    return np.maximum(x @ w.T + h @ r.T + wb + rb, 0), c


def gru(
    x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array, after: bool = False
) -> Any:
    (wz, wr, wh), (rz, rr, rh) = np.split(w, 3), np.split(r, 3)
    (bz, br, bh), (cz, cr, ch) = np.split(wb, 3), np.split(rb, 3)
    z = sigmoid(x @ wz.T + h @ rz.T + bz + cz)
    reset = sigmoid(x @ wr.T + h @ rr.T + br + cr)
    inner = reset * (h @ rh.T + ch) if after else (reset * h) @ rh.T + ch
    return (1 - z) * np.tanh(x @ wh.T + inner + bh) + z * h, c


def gru_after(*values: Array) -> Any:
    return gru(*values, after=True)


def lstm(x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array) -> Any:
    i, o, f, g = np.split(x @ w.T + h @ r.T + wb + rb, 4, axis=1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def layer(cell: Cell, direction: str, arrays: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Y, Y_h and Y_c of any of the three."""
    x, w, r = arrays["x"], arrays["w"], arrays["r"]
    count, hidden = len(w), r.shape[2]
    steps, batch = x.shape[:2]
    lengths = arrays.get("lengths", np.full(batch, steps))
    bias = arrays.get("b", np.zeros((count, 2 * w.shape[1])))
    zeros = np.zeros((count, batch, hidden))
    h, c = arrays.get("h", zeros).copy(), arrays.get("c", zeros).copy()
    y = np.zeros((steps, count, batch, hidden))
    for d in range(count):
        backwards = d == 1 or direction == "reverse"
        for t in reversed(range(steps)) if backwards else range(steps):
            peepholes = [arrays["p"][d]] if "p" in arrays else []
            new = cell(x[t], h[d], c[d], w[d], r[d], *np.split(bias[d], 2), *peepholes)
            inside = (t < lengths)[:, None]
            h[d], c[d] = (np.where(inside, n, o) for n, o in zip(new, (h[d], c[d]), strict=True))
            y[t, d] = np.where(inside, new[0], 0)
    # The final state of a sequence without any step is 0 in onnxruntime, not that of its start.
    some = (lengths > 0)[:, None]
    return y, h * some, c * some


def recurrent(
    op_type: str,
    cell: Cell,
    direction: str = "forward",
    *,
    use: str = "yh",
    sizes: tuple[int, int, int, int] = (3, 2, 2, 2),
    **options: Any,
) -> Case:
    """``use`` names the outputs that the value is made of, and the optional inputs that are given
    (l: lengths, le: one of them 0).

    ``sizes`` are steps, batch, inputs and hidden states.
    """
    steps, batch, size, hidden = sizes
    count = 2 if direction == "bidirectional" else 1
    rows = GATES[op_type] * hidden
    arrays: dict[str, Array] = {
        "x": data(steps, batch, size),
        "w": data(count, rows, size, seed=1, low=-1, high=1),
        "r": data(count, rows, hidden, seed=2, low=-1, high=1),
    }
    if "b" in use:
        arrays["b"] = data(count, 2 * rows, seed=3, low=-1, high=1)
    if "l" in use:
        arrays["lengths"] = np.array([2, 3] if "e" not in use else [0, 3], np.int32)
    if "0" in use:
        arrays["h"] = data(count, batch, hidden, seed=4, low=-1, high=1)
        if op_type == "LSTM":
            arrays["c"] = data(count, batch, hidden, seed=5)
    outputs = 3 if op_type == "LSTM" else 2
    sizes_of = [(steps, count, batch, hidden), (count, batch, hidden), (count, batch, hidden)]
    weights = [data(*s, seed=6 + k) for k, s in enumerate(sizes_of)]
    chosen = [k for k, letter in enumerate("yhc"[:outputs]) if letter in use.split("-")[0]]

    def formula(op: Any, **given: Any) -> Any:
        names = ["x", "w", "r", "b", "lengths", "h", "c"][: 6 + (op_type == "LSTM")]
        inputs = [given.get(n) for n in names]
        settings = {"hidden_size": hidden, "direction": direction, **options}
        found = op(op_type, *inputs, outputs=outputs, **settings)
        parts = [op.ReduceSum(found[k] * _as(op, weights[k], found[k]), keepdims=0) for k in chosen]
        return sum(parts[1:], parts[0])

    def oracle(**given: Array) -> Array:
        found = layer(cell, direction, given)
        return np.asarray(sum((found[k] * weights[k]).sum() for k in chosen))

    label = "-".join([op_type, direction, use, *(f"{k}={v}" for k, v in options.items())])
    label += "" if sizes == (3, 2, 2, 2) else f"-{sizes}"
    # onnxruntime computes these in float32 only.
    fields: dict[str, Any] = {"sized": ("w", "r", "b"), "dtypes": (np.float32,)}
    return case(label, formula, oracle=oracle, **fields, **arrays)


def _as(op: Any, array: Array, like: Any) -> Any:
    return op.constant(array.astype("f4"), like.dtype)


CASES = [
    recurrent("RNN", rnn, "bidirectional", use="yh-b0l"),
    recurrent("RNN", relu_rnn, "reverse", use="y", activations=["Relu"]),
    recurrent("GRU", gru, "bidirectional", use="yh-b0l"),
    # onnxruntime-training 1.16 wrote over what its Scan still read.
    recurrent("GRU", gru, use="hy-b", sizes=(1, 3, 3, 2)),
    recurrent("RNN", rnn, "bidirectional", use="yh-b", sizes=(4, 1, 3, 1)),
    recurrent("GRU", gru_after, "reverse", use="h", linear_before_reset=1),
    recurrent("GRU", gru_after, "bidirectional", use="y-b0l", linear_before_reset=1),
    recurrent("LSTM", lstm, use="h"),
    recurrent("LSTM", lstm, "reverse", use="y-b"),
    recurrent("LSTM", lstm, use="hc-bl"),
    recurrent("LSTM", lstm, "bidirectional", use="yhc-b0l"),
    # An empty sequence.
    recurrent("LSTM", lstm, use="yhc-b0le"),
    recurrent("GRU", gru, "bidirectional", use="yh-b0le"),
]
