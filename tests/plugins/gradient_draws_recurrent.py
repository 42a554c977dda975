"""Draws of RNN, GRU and LSTM: sizes, directions, lengths, activations, clipping, peepholes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np

from ortflex_core import Array
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_cases_recurrent import GATES, _as, layer, sigmoid
from tests.plugins.gradient_draws import F32, Draw, Draws, drawn, numbers, torch
from tests.tracing import NEWEST

DRAWS = Draws()

# Name, activation_alpha, activation_beta.
ACTIVATIONS = {
    "Sigmoid": (None, None, sigmoid),
    "Tanh": (None, None, np.tanh),
    "Softsign": (None, None, lambda v: v / (1 + abs(v))),
    "Softplus": (None, None, lambda v: np.log1p(np.exp(v))),
    "Relu": (None, None, lambda v: np.maximum(v, 0)),
    "LeakyRelu": (0.3, None, lambda v: np.where(v > 0, v, 0.3 * v)),
    "ThresholdedRelu": (0.2, None, lambda v: np.where(v > 0.2, v, 0)),
    "Elu": (0.7, None, lambda v: np.where(v > 0, v, 0.7 * np.expm1(v))),
    "Affine": (0.6, 0.1, lambda v: 0.6 * v + 0.1),
    "ScaledTanh": (1.3, 0.6, lambda v: 1.3 * np.tanh(0.6 * v)),
    "HardSigmoid": (0.3, 0.4, lambda v: np.clip(0.3 * v + 0.4, 0, 1)),
}
USUAL = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def cell(operator: str, chosen: list[str], options: dict[str, Any], peep: Any) -> Any:
    """One step of the standard's equations, with what is chosen for it."""
    functions = [ACTIVATIONS[n][2] for n in chosen]
    clip = options.get("clip")

    def held(v: Array) -> Array:
        return v if clip is None else np.clip(v, -clip, clip)

    def rnn(x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array) -> Any:
        return functions[0](held(x @ w.T + h @ r.T + wb + rb)), c

    def gru(x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array) -> Any:
        xs, rs, bs = np.split(x @ w.T + wb, 3, axis=1), np.split(r, 3), np.split(rb, 3)
        z, reset = (functions[0](held(xs[k] + h @ rs[k].T + bs[k])) for k in (0, 1))
        after = options.get("linear_before_reset")
        inner = reset * (h @ rs[2].T + bs[2]) if after else (reset * h) @ rs[2].T + bs[2]
        return (1 - z) * functions[1](held(xs[2] + inner)) + z * h, c

    def lstm(
        x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array, p: Any = None
    ) -> Any:
        i, o, f, g = np.split(x @ w.T + h @ r.T + wb + rb, 4, axis=1)
        p_i, p_o, p_f = (0.0, 0.0, 0.0) if p is None else np.split(p, 3)
        i = functions[0](held(i + p_i * c))
        f = 1 - i if options.get("input_forget") else functions[0](held(f + p_f * c))
        new = f * c + i * functions[1](held(g))
        return functions[0](held(o + p_o * new)) * functions[2](new), new

    return {"RNN": rnn, "GRU": gru, "LSTM": lstm}[operator]


@DRAWS.of(*GATES)
def recurrent(draw: Draw, operator: str) -> Case:
    steps, batch, size, hidden = (
        draw(st.integers(1, n)) for n in ((4, 2, 2, 2) if operator == "LSTM" else (4, 3, 3, 2))
    )
    direction = draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    count = 2 if direction == "bidirectional" else 1
    rows = GATES[operator] * hidden
    options: dict[str, Any] = {}
    if draw(st.integers(0, 2)) == 0:
        options["clip"] = 0.6
    if operator == "GRU" and draw(st.booleans()):
        options["linear_before_reset"] = 1
    if operator == "LSTM" and draw(st.integers(0, 3)) == 0:
        options["input_forget"] = 1
    chosen = USUAL[operator]
    if draw(st.integers(0, 2)) == 0:
        chosen = [draw(st.sampled_from(sorted(ACTIVATIONS))) for _ in chosen]
        options["activations"] = chosen * count
        for k, name in enumerate(("activation_alpha", "activation_beta")):
            values = [ACTIVATIONS[n][k] for n in chosen * count]
            if given := [v for v in values if v is not None]:
                options[name] = given
    arrays = {
        "x": numbers(draw, (steps, batch, size)),
        "w": numbers(draw, (count, rows, size), -1, 1, salt=1),
        "r": numbers(draw, (count, rows, hidden), -1, 1, salt=2),
    }
    if draw(st.booleans()):
        arrays["b"] = numbers(draw, (count, 2 * rows), -1, 1, salt=3)
    if draw(st.booleans()):
        # Of an empty sequence older runtimes' RNN gives what happened to lie in memory.
        least = 1 if operator == "RNN" and NEWEST < 26 else 0
        lengths = [draw(st.integers(least, steps)) for _ in range(batch)]
        arrays["lengths"] = np.array(lengths, np.int32)
    if draw(st.booleans()):
        arrays["h"] = numbers(draw, (count, batch, hidden), -1, 1, salt=4)
    if operator == "LSTM" and draw(st.booleans()):
        arrays["c"] = numbers(draw, (count, batch, hidden), salt=5)
    if operator == "LSTM" and draw(st.integers(0, 2)) == 0:
        arrays["p"] = numbers(draw, (count, 3 * hidden), -1, 1, salt=6)
    outputs = 3 if operator == "LSTM" else 2
    used = draw(st.lists(st.integers(0, outputs - 1), unique=True, min_size=1))
    sizes = [(steps, count, batch, hidden), (count, batch, hidden), (count, batch, hidden)]
    weights = [numbers(draw, s, salt=7 + k) for k, s in enumerate(sizes)]
    settings = {"hidden_size": hidden, "direction": direction, **options}

    def formula(op: Any, **given: Any) -> Any:
        names = ["x", "w", "r", "b", "lengths", "h", "c", "p"][: 8 if operator == "LSTM" else 6]
        found = op(operator, *(given.get(n) for n in names), outputs=outputs, **settings)
        parts = [op.ReduceSum(found[k] * _as(op, weights[k], found[k]), keepdims=0) for k in used]
        return sum(parts[1:], parts[0])

    def oracle(**given: Array) -> Array:
        found = layer(cell(operator, chosen, options, None), direction, given)
        return np.asarray(sum((found[k] * weights[k]).sum() for k in used))

    fields = {}
    plain = operator == "LSTM" and not options and "p" not in arrays and "lengths" not in arrays
    if plain and direction != "reverse":
        fields["torch"] = lambda **given: in_torch(
            given, hidden, count, [weights[k] for k in used], used
        )
    return drawn(
        f"{operator} {direction} {options} uses {used}",
        formula,
        arrays,
        oracle=oracle,
        sized=("w", "r", "b", "p"),
        dtypes=F32,
        **fields,
    )


def in_torch(
    given: dict[str, Any], hidden: int, count: int, weights: list[Array], used: list[int]
) -> Any:
    """torch's own LSTM, whose gates are in another order."""
    order = [0, 2, 3, 1]

    def rows(t: Any) -> Any:
        return torch.cat([t.split(hidden)[k] for k in order])

    x = given["x"]
    parameters = []
    for k in range(count):
        b = given.get("b", torch.zeros(count, 8 * hidden).double())[k]
        parameters += [rows(given["w"][k]), rows(given["r"][k])]
        parameters += [rows(b[: 4 * hidden]), rows(b[4 * hidden :])]
    zeros = torch.zeros(count, x.shape[1], hidden).double()
    start = [given.get("h", zeros), given.get("c", zeros)]
    y, h, c = torch.lstm(x, start, parameters, True, 1, 0.0, False, count == 2, False)
    y = y.reshape(*y.shape[:2], count, hidden).permute(0, 2, 1, 3)
    return sum(((y, h, c)[k] * torch.tensor(w)).sum() for k, w in zip(used, weights, strict=True))
