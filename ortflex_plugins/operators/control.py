"""If, Loop, Scan, and the recurrent operators, which are scans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ortflex_plugins.operators.calls import Call, NotTranslatable, Table, Value

TABLE = Table()


@TABLE("If")
def _if(c: Call, condition: Value) -> Any:
    branches = c.get("then_branch"), c.get("else_branch")
    if isinstance(condition, np.ndarray):
        return tuple(c.run(branches[0 if condition.item() else 1], []))
    yes, no = (lambda graph=graph: _arrays(c, c.run(graph, [])) for graph in branches)
    try:
        return c.forms.cond(condition, yes, no)
    except TypeError as error:
        raise NotTranslatable("an If whose branches give tensors of different shapes") from error


def _arrays(c: Call, values: list[Value]) -> tuple[Value, ...]:
    return tuple(map(c.xp.asarray, values))


@TABLE("Loop")
def _loop(c: Call, most: Value, condition: Value, *state: Value) -> Any:
    body, kept = c.get("body"), len(state)
    written = c.outputs - kept
    start = True if condition is None else condition
    if isinstance(start, np.ndarray):
        start = bool(start.item())
    if isinstance(most, np.ndarray):
        most = int(most.item())
    if start is False or most == 0:
        if written:
            raise NotTranslatable("a Loop that never runs and collects its results")
        return state
    if start is True and isinstance(most, int):
        out = _counted(c, body, most, state)
        if out is not None:
            return out
    if written:
        raise NotTranslatable("a Loop that collects results and ends by a condition of the data")

    def test(now: tuple[Value, ...]) -> Value:
        goes = now[1]
        return goes if most is None else goes & (now[0] < most)

    def step(now: tuple[Value, ...]) -> tuple[Value, ...]:
        goes, *after = c.run(body, [now[0], now[1], *now[2:]])
        moved = (c.xp.asarray(a).astype(b.dtype) for a, b in zip(after, now[2:], strict=True))
        return (now[0] + 1, c.xp.asarray(goes).reshape(()), *moved)

    most = most.reshape(()) if hasattr(most, "reshape") else most
    first = c.xp.asarray(start).reshape(())
    begin = (c.xp.asarray(np.int64(0)), first, *map(c.xp.asarray, state))
    try:
        return c.forms.while_loop(test, step, begin)[2:]
    except TypeError as error:
        raise NotTranslatable("a Loop whose state changes its shape") from error


class _Ends(Exception):
    """The condition of a loop depends on values that the loop computes."""


def _counted(c: Call, body: Any, most: int, state: tuple[Value, ...]) -> Any:
    """A loop of a known number of iterations as a scan; None if its condition may end it."""

    def step(now: tuple[Value, ...], at: tuple[Value, ...]) -> Any:
        goes, *after = c.run(body, [at[0], np.asarray(True), *now])
        if not (isinstance(goes, np.ndarray) and goes.item()):
            raise _Ends
        after = list(_arrays(c, after))
        return tuple(after[: len(now)]), tuple(after[len(now) :])

    try:
        last, written = c.forms.scan(step, state, (np.arange(most, dtype=np.int64),), most)
    except _Ends:
        return None
    except TypeError as error:
        raise NotTranslatable("a Loop whose state changes its shape") from error
    return (*last, *written)


@TABLE("Scan")
def _scan(c: Call, *inputs: Value) -> Any:
    if c.opset < 9:
        raise NotTranslatable("a Scan of opset 8")
    scanned = c.get("num_scan_inputs")
    kept = len(inputs) - scanned
    written = c.outputs - kept
    rows = []
    for k, x in enumerate(inputs[kept:]):
        x = c.xp.moveaxis(x, (c.get("scan_input_axes") or [0] * scanned)[k], 0)
        backwards = (c.get("scan_input_directions") or [0] * scanned)[k]
        rows.append(c.xp.flip(x, 0) if backwards else x)

    def step(now: tuple[Value, ...], at: tuple[Value, ...]) -> Any:
        after = _arrays(c, c.run(c.get("body"), [*now, *at]))
        return after[:kept], after[kept:]

    try:
        last, made = c.forms.scan(step, tuple(inputs[:kept]), tuple(rows), rows[0].shape[0])
    except TypeError as error:
        raise NotTranslatable("a Scan whose state changes its shape") from error
    out = []
    for k, x in enumerate(made):
        backwards = (c.get("scan_output_directions") or [0] * written)[k]
        axis = (c.get("scan_output_axes") or [0] * written)[k]
        out.append(c.xp.moveaxis(c.xp.flip(x, 0) if backwards else x, 0, axis))
    return (*last, *out)


# Recurrent ---------------------------------------------------------------------------------------

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
_NUMBERS: Mapping[str, tuple[float | None, ...]] = {
    "leakyrelu": (0.01,),
    "thresholdedrelu": (None,),  # 1 in the standard, 0 in onnxruntime
    "elu": (1.0,),
    "hardsigmoid": (0.2, 0.5),
    "affine": (None, None),
    "scaledtanh": (None, None),
}
"""The defaults of alpha, and of beta, of the activations that take them; None: it has to be given."""


def _activation(c: Call, name: str, a: float = 1.0, b: float = 0.0) -> Any:
    xp = c.xp
    table = {
        "Tanh": xp.tanh,
        "Sigmoid": lambda x: 0.5 * xp.tanh(0.5 * x) + 0.5,
        "Relu": lambda x: xp.maximum(x, 0),
        "Affine": lambda x: a * x + b,
        "LeakyRelu": lambda x: xp.where(x >= 0, x, a * x),
        "ThresholdedRelu": lambda x: xp.where(x > a, x, 0),
        "ScaledTanh": lambda x: a * xp.tanh(b * x),
        "HardSigmoid": lambda x: xp.clip(a * x + b, 0, 1),
        "Elu": lambda x: xp.where(x > 0, x, a * xp.expm1(xp.minimum(x, 0))),
        "Softsign": lambda x: x / (1 + xp.abs(x)),
        "Softplus": lambda x: xp.logaddexp(x, xp.zeros_like(x)),
    }
    known = {key.lower(): value for key, value in table.items()}
    if name.lower() not in known:
        raise NotTranslatable(f"{c.name} with the activation {name}")
    return known[name.lower()]


def _activations(c: Call, sides: int) -> list[list[Any]]:
    """The functions of each direction."""
    names = c.get("activations") or _DEFAULTS[c.name] * sides
    sources = [iter(c.get(f"activation_{n}") or []) for n in ("alpha", "beta")]
    out = []
    for name in names:
        defaults = _NUMBERS.get(name.lower(), ())
        values = [next(s, default) for s, default in zip(sources, defaults, strict=False)]
        numbers = [float(v) for v in values if v is not None]
        if len(numbers) < len(values):
            raise NotTranslatable(
                f"{c.name} with the activation {name} without its activation_alpha or _beta"
            )
        out.append(_activation(c, name, *numbers))
    size = len(_DEFAULTS[c.name])
    return [out[k * size : (k + 1) * size] for k in range(sides)]


@TABLE("RNN", "GRU", "LSTM", attributes=("hidden_size",))
def _recurrent(c: Call, *inputs: Value) -> Any:
    x, w, r, bias, lengths, h0, c0, peep = (*inputs, *[None] * 8)[:8]
    if c.get("layout", 0):
        x = c.xp.swapaxes(x, 0, 1)
        h0, c0 = (None if s is None else c.xp.swapaxes(s, 0, 1) for s in (h0, c0))
    sides, size = w.shape[0], r.shape[2]
    steps, rows = x.shape[:2]
    functions = _activations(c, sides)
    zero = c.xp.zeros((rows, size), x.dtype)
    sequences, last_h, last_c = [], [], []
    for k in range(sides):
        backwards = k == 1 or c.get("direction", "forward") == "reverse"
        places = np.arange(steps)[:, None]
        order: Any = places[::-1] if backwards else places
        if lengths is not None and backwards:
            own = c.xp.asarray(lengths)[None, :]
            order = c.xp.where(places < own, own - 1 - places, places)
        turned = _rows(c, x, order)
        halves = [None, None] if bias is None else np.split(np.arange(bias.shape[1]), 2)
        b_w, b_r = (c.xp.zeros((w.shape[1],), x.dtype) if h is None else bias[k][h] for h in halves)
        from_x = c.xp.matmul(turned, w[k].T) + b_w
        begin = (zero if h0 is None else h0[k], zero if c0 is None else c0[k])
        p = None if peep is None else peep[k]
        alive = None if lengths is None else places < c.xp.asarray(lengths)[None, :]
        cell = _cell(c, functions[k], r[k], b_r, p, size)

        def step(now: Any, at: Any, cell: Any = cell) -> Any:
            after = cell(now, at[0])
            shown = after[0]
            if len(at) > 1:
                keep = at[1][:, None]
                after = tuple(c.xp.where(keep, a, b) for a, b in zip(after, now, strict=True))
                shown = c.xp.where(keep, shown, c.xp.zeros_like(shown))
            return after, (shown,)

        given = (from_x,) if alive is None else (from_x, alive)
        (h, state), (made,) = c.forms.scan(step, begin, given, steps)
        sequences.append(_rows(c, made, order) if backwards else made)
        last_h.append(h)
        last_c.append(state)
    y = c.xp.stack(sequences, axis=1)
    h, state = c.xp.stack(last_h), c.xp.stack(last_c)
    if c.get("layout", 0):
        y = c.xp.transpose(y, (2, 0, 1, 3))
        h, state = c.xp.swapaxes(h, 0, 1), c.xp.swapaxes(state, 0, 1)
    return (y, h, state)[: c.outputs]


def _rows(c: Call, x: Value, order: Value) -> Value:
    """The time steps of every row in an order [steps, rows or 1]."""
    index = c.xp.broadcast_to(order, x.shape[:2])[:, :, None]
    return c.xp.take_along_axis(x, c.xp.broadcast_to(index, x.shape), axis=0)


def _cell(c: Call, fs: list[Any], r: Value, b_r: Value, p: Value, n: int) -> Any:
    """One time step: the new (h, c) from (h, c) and the contribution of x."""
    bound, xp = c.get("clip"), c.xp

    def clipped(v: Value) -> Value:
        return v if bound is None else xp.clip(v, -bound, bound)

    def rnn(now: Any, x: Value) -> Any:
        h, state = now
        return fs[0](clipped(x + xp.matmul(h, r.T) + b_r)), state

    def gru(now: Any, x: Value) -> Any:
        h, state = now
        both = clipped(x[:, : 2 * n] + xp.matmul(h, r[: 2 * n].T) + b_r[: 2 * n])
        z, reset = fs[0](both[:, :n]), fs[0](both[:, n:])
        if c.get("linear_before_reset", 0):
            inner = x[:, 2 * n :] + reset * (xp.matmul(h, r[2 * n :].T) + b_r[2 * n :])
        else:
            inner = x[:, 2 * n :] + xp.matmul(reset * h, r[2 * n :].T) + b_r[2 * n :]
        new = fs[1](clipped(inner))
        return (1 - z) * new + z * h, state

    def lstm(now: Any, x: Value) -> Any:
        h, state = now
        i, o, f, g = xp.split(x + xp.matmul(h, r.T) + b_r, 4, axis=-1)
        if p is not None:
            i, f = i + p[:n] * state, f + p[2 * n :] * state
        i = fs[0](clipped(i))
        f = 1 - i if c.get("input_forget", 0) else fs[0](clipped(f))
        new = f * state + i * fs[1](clipped(g))
        o = o if p is None else o + p[n : 2 * n] * new
        return fs[0](clipped(o)) * fs[2](new), new

    return {"RNN": rnn, "GRU": gru, "LSTM": lstm}[c.name]
