"""Draws of what reads sequences: RNN, GRU, LSTM, attention and rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np

from ortflex_core import Array
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import (
    F32,
    Draw,
    Draws,
    drawn,
    numbers,
    random,
    smaller,
    tenths,
    torch,
)
from tests.tracing import NEWEST

DRAWS = Draws()

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
Cell = Callable[..., tuple[Array, Array]]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


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


def _as(op: Any, array: Array, like: Any) -> Any:
    return op.constant(array.astype("f4"), like.dtype)


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


@DRAWS.of("Attention")
def attention(draw: Draw, operator: str) -> Case:
    """Heads of their own or shared, masks of every kind, keys of the past."""
    batch, few, shared = (draw(st.integers(1, 2)) for _ in range(3))
    queries, keys, size, width = (draw(st.integers(1, 3)) for _ in range(4))
    flat = draw(st.booleans())
    heads = few * shared
    before = draw(st.sampled_from([0, 0, 2]))
    causal = before == 0 and draw(st.booleans())
    options: dict[str, Any] = {}
    if causal:
        options["is_causal"] = 1
    if draw(st.booleans()):
        options["scale"] = draw(tenths(1, 15))
    if draw(st.booleans()):
        options["softcap"] = draw(tenths(5, 30))
    if flat:
        options |= {"q_num_heads": heads, "kv_num_heads": few}

    def given(n: int, length: int, each: int, salt: int) -> Array:
        shape = (batch, length, n * each) if flat else (batch, n, length, each)
        return numbers(draw, shape, salt=salt)  # type: ignore[no-any-return]

    arrays = {
        "q": given(heads, queries, size, 0),
        "k": given(few, keys, size, 1),
        "v": given(few, keys, width, 2),
    }
    kind = draw(st.sampled_from(["none", "none", "boolean", "added"]))
    shape = (batch, heads, queries, keys + before)
    if kind != "none":
        own = (*(smaller(draw, shape[:2]) or ()), *shape[2:])
        if kind == "added":
            arrays["mask"] = numbers(draw, own, salt=3)
        else:  # every query sees its first key
            mask = random(draw).integers(0, 2, own).astype(bool)
            mask[..., 0] = True
            arrays["mask"] = mask
    if before:
        arrays["pk"] = numbers(draw, (batch, few, before, size), salt=4)
        arrays["pv"] = numbers(draw, (batch, few, before, width), salt=5)

    def formula(
        op: Any, q: Any, k: Any, v: Any, mask: Any = None, pk: Any = None, pv: Any = None
    ) -> Any:
        if pk is None:
            return op.Attention(q, k, v, mask, **options)
        y, all_k, all_v = op.Attention(q, k, v, mask, pk, pv, outputs=3, **options)
        return sum(
            (op.ReduceSum(t * t, keepdims=0) for t in (all_k, all_v)), op.ReduceSum(y, keepdims=0)
        )

    def in_torch(q: Any, k: Any, v: Any, mask: Any = None, pk: Any = None, pv: Any = None) -> Any:
        if flat:
            q, k, v = (
                t.reshape(batch, t.shape[1], n, -1).transpose(1, 2)
                for t, n in ((q, heads), (k, few), (v, few))
            )
        if pk is not None:
            k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
        many_k, many_v = (t.repeat_interleave(shared, 1) for t in (k, v))
        scores = q @ many_k.transpose(-1, -2) * options.get("scale", size**-0.5)
        if "softcap" in options:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        if kind == "boolean":
            scores = torch.where(mask, scores, -1e30)
        elif kind == "added":
            scores = scores + mask
        if causal:
            seen = torch.ones(queries, keys, dtype=torch.bool).tril()
            scores = torch.where(seen, scores, -1e30)
        y = torch.softmax(scores, -1) @ many_v
        if flat:
            y = y.transpose(1, 2).reshape(batch, queries, -1)
        return y if pk is None else y.sum() + (k * k).sum() + (v * v).sum()

    return drawn(
        f"Attention {options} {kind} before={before}",
        formula,
        arrays,
        since=23,
        sized=("q", "k", "v", "mask", "pk", "pv"),
        reference=True,
        torch=in_torch,
    )


def turned(x: Array, cos: Array, sin: Array, part: int, pairs: int) -> Array:
    """[B, heads, S, n] turned by angles [B, S, part / 2]."""
    cos, sin = cos[:, None], sin[:, None]
    half = part // 2
    first = x[..., 0:part:2] if pairs else x[..., :half]
    second = x[..., 1:part:2] if pairs else x[..., half:part]
    real, imaginary = first * cos - second * sin, first * sin + second * cos
    if pairs:
        found = np.stack([real, imaginary], -1).reshape(*x.shape[:-1], part)
    else:
        found = np.concatenate([real, imaginary], -1)
    return np.concatenate([found, x[..., part:]], -1)


@DRAWS.of("RotaryEmbedding")
def rotary(draw: Draw, operator: str) -> Case:
    batch, heads, steps = (draw(st.integers(1, 2)) for _ in range(3))
    size = 2 * draw(st.integers(1, 3))
    part = draw(st.sampled_from([0, 2])) if size > 2 else 0
    pairs = draw(st.integers(0, 1))
    flat = draw(st.booleans()) or part > 0  # a part of a head is for three dimensions
    half = (part or size) // 2
    placed, learned = draw(st.booleans()), draw(st.booleans())
    rows = (4, half) if placed else (batch, steps, half)
    options: dict[str, Any] = {"interleaved": pairs}
    if part:
        options["rotary_embedding_dim"] = part
    if flat:
        options["num_heads"] = heads
    shape = (batch, steps, heads * size) if flat else (batch, heads, steps, size)
    arrays = {"x": numbers(draw, shape)}
    caches = {n: numbers(draw, rows, salt=k) for k, n in ((1, "cos"), (2, "sin"))}
    if learned:
        arrays |= caches
    if placed:
        arrays["at"] = random(draw).integers(0, 4, (batch, steps))
    held = {n: c.astype(np.float32) for n, c in caches.items()}

    def formula(op: Any, x: Any, at: Any = None, **given: Any) -> Any:
        angles = [given[n] if learned else op.constant(held[n], x.dtype) for n in held]
        return op.RotaryEmbedding(x, *angles, at, **options)

    def oracle(x: Array, at: Array | None = None, **given: Array) -> Array:
        angles = [given.get(n, c.astype(float)) for n, c in held.items()]
        cos, sin = angles if at is None else (a[at] for a in angles)
        value = x.reshape(batch, steps, heads, size).swapaxes(1, 2) if flat else x
        y = turned(value, cos, sin, part or size, pairs)
        return y.swapaxes(1, 2).reshape(shape) if flat else y

    return drawn(
        f"RotaryEmbedding {options} placed={placed} learned={learned}",
        formula,
        arrays,
        since=23,
        sized=("x",),
        oracle=oracle,
        dtypes=F32,
    )
