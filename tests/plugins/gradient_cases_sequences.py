"""Written cases of loops, sequences of tensors, attention and recurrent layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_core import Array
from tests.gradcheck import data
from tests.plugins.gradient_cases import F32, Case, case
from tests.plugins.gradient_draws_control import text
from tests.plugins.gradient_draws_recurrent import GATES, USUAL, _as, cell, layer

_x, _w = data(2, 3), data(3, seed=1)

_WHILE = """
    y, q = Loop(n, c, x, n) <
        body = b (int64 i, bool go, FLOAT s, int64 count) => (bool on, FLOAT t, int64 more) {
            three = Constant <value = int64 {3}> ()
            two = Constant <value = int64 {2}> ()
            on = Less(i, three)
            odd = Mod(i, two)
            now = Cast <to = 9> (odd)
            more = Add(count, three)
            t = If(now) <
                then_branch = p () => (FLOAT u) { e = Tanh(s) u = Mul(e, w) },
                else_branch = q () => (FLOAT v) { v = Sub(s, x) }
            >
        }
    >
"""


_SEQUENCES = """
    two = Constant <value = int64[2] {1, 2}> ()
    parts = SplitToSequence <axis = 1> (x, two)
    last = Constant <value = int64 {-1}> ()
    b = SequenceAt(parts, last)
    first = Constant <value = int64 {0}> ()
    a = SequenceAt(parts, first)
    bent = Tanh(b)
    made = SequenceConstruct(a, bent)
    longer = SequenceInsert(made, b, first)
    doubled = SequenceMap <body = m (FLOAT e) => (FLOAT f) { f = Mul(e, e) }> (longer)
    shorter = SequenceErase(doubled, last)
    whole = ConcatFromSequence <axis = 1> (shorter)
    maybe = Optional(whole)
    y = OptionalGetElement(maybe)
"""
# What torch's exporters write for a list that grows.
_GROWING = """
    n = Constant <value = int64 {3}> ()
    empty = SequenceEmpty()
    s, list = Loop(n, , x, empty) <
        body = b (int64 i, bool go, FLOAT s, seq(FLOAT) l) => (bool on, FLOAT t, seq(FLOAT) m) {
            on = Identity(go)
            p = MatMul(s, w)
            t = Tanh(p)
            m = SequenceInsert(l, t)
        }
    >
    y = ConcatFromSequence <axis = 0, new_axis = 1> (list)
"""

# A number of parts that is known at run time only, unless all sizes are.
_PARTS = """
    parts = SplitToSequence <axis = 0> (x, k)
    a = SequenceAt(parts, place)
    p = Mul(a, a)
    b = ReduceSum <keepdims = 0> (p)
    n = SequenceLength(parts)
    m = CastLike(n, b)
    whole = ConcatFromSequence <axis = 0> (parts)
    c = Mul(whole, b)
    y = Mul(c, m)
"""
_ROWS = """
    parts = SplitToSequence <axis = 1, keepdims = 0> (x)
    a = SequenceAt(parts, place)
    whole = ConcatFromSequence <axis = 2, new_axis = 1> (parts)
    p = Mul(a, a)
    b = ReduceSum <keepdims = 0> (p)
    y = Mul(whole, b)
"""


def chunks(size: int) -> str:
    return f"k = Constant <value = int64 {{{size}}}> ()" + _PARTS


CONTROL = [
    *(
        text(f"Sequences-{k}-at{p}", chunks(k), x=_x[:2], place=np.array(p))
        for k, p in ((1, 1), (1, -2), (2, 0), (2, -1))
    ),
    text("Sequences-rows", _ROWS, x=data(2, 3, 2), place=np.array(-2)),
    text("Sequences", _SEQUENCES, x=data(2, 3, seed=5)),
    text("Sequences-growing", _GROWING, x=_x, w=data(3, 3, seed=2)),
    text("Loop-while", _WHILE, x=_x, n=np.array(10), c=np.array(True), w=_w),
    text("Loop-stopped", _WHILE, x=_x, n=np.array(10), c=np.array(False), w=_w),
]


def blind(name: str, mask: Array, seen: Array, **options: Any) -> Case:
    """Queries of which some see no key at all: they get 0, whatever mask says so."""

    def formula(op: Any, q: Any, k: Any, v: Any) -> Any:
        held = op.constant(mask if mask.dtype == bool else mask.astype(np.float32))
        return op.Attention(q, k, v, held, **options)

    def oracle(q: Array, k: Array, v: Array) -> Array:
        scores = np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(2), -np.inf)
        shares = np.exp(scores) * seen.any(-1, keepdims=True)
        total = shares.sum(-1, keepdims=True)
        return np.asarray(shares / np.where(total, total, 1) @ v)

    return case(
        f"Attention-blind-{name}",
        formula,
        q=data(1, 2, 2, 2),
        k=data(1, 2, 3, 2, seed=1),
        v=data(1, 2, 3, 3, seed=2),
        **{"since": 23, "sized": ("q", "k", "v"), "oracle": oracle, "dtypes": F32},
    )


_nothing = np.array([[False, False, False], [True, True, False]])
_not_first = np.array([[False, True, True], [True, True, False]])
ATTENTION = [
    blind("boolean", _nothing, _nothing),
    blind("infinite", np.where(_nothing, 0.0, -np.inf), _nothing),
    blind("lowest", np.where(_nothing, 0.0, np.finfo(np.float32).min), _nothing),
    blind("causal", _not_first, _nothing, is_causal=1),
    case(
        "Attention-of-itself",
        lambda op, x: op.Attention(x, x, x),
        **{"x": data(1, 2, 2, 3), "since": 23, "sized": ("x",), "reference": True},
    ),
    case(
        "Attention-of-each-other",
        lambda op, x: op.Attention(x, op.Tanh(x), op.Sin(op.Tanh(x))),
        **{"x": data(1, 2, 2, 3), "since": 23, "sized": ("x",), "reference": True},
    ),
]


def recurrent(name: str, count: int, sizes: tuple[int, int, int, int], **given: Array) -> Case:
    """All outputs, weighted; ``sizes`` are steps, batch, inputs and hidden states."""
    operator, direction = name.split("-")[:2]
    steps, batch, size, hidden = sizes
    rows, outputs = GATES[operator] * hidden, 3 if operator == "LSTM" else 2
    arrays = {
        "x": data(steps, batch, size),
        "w": data(count, rows, size, seed=1, low=-1, high=1),
        "r": data(count, rows, hidden, seed=2, low=-1, high=1),
        "b": data(count, 2 * rows, seed=3, low=-1, high=1),
        **given,
    }
    ends = (count, batch, hidden)
    weights = [data(*s, seed=6 + k) for k, s in enumerate(((steps, *ends), ends, ends)[:outputs])]

    def formula(op: Any, **given: Any) -> Any:
        inputs = [given.get(n) for n in ("x", "w", "r", "b", "lengths", "h", "c")[: 4 + outputs]]
        found = op(operator, *inputs, outputs=outputs, hidden_size=hidden, direction=direction)
        parts = [
            op.ReduceSum(y * _as(op, w, y), keepdims=0) for y, w in zip(found, weights, strict=True)
        ]
        return sum(parts[1:], parts[0])

    def oracle(**given: Array) -> Array:
        found = layer(cell(operator, USUAL[operator], {}, None), direction, given)
        return np.asarray(sum((y * w).sum() for y, w in zip(found, weights, strict=False)))

    return case(name, formula, oracle=oracle, sized=("w", "r", "b"), dtypes=F32, **arrays)


_empty = {"lengths": np.array([0, 3], np.int32), "h": data(1, 2, 2, seed=4, low=-1, high=1)}

RECURRENT = [
    # onnxruntime-training 1.16 wrote over what its Scan still read.
    recurrent("GRU-forward", 1, (1, 3, 3, 2)),
    recurrent("RNN-bidirectional", 2, (4, 1, 3, 1)),
    recurrent("LSTM-forward-empty", 1, (3, 2, 2, 2), **_empty, c=data(1, 2, 2, seed=5)),
    recurrent("GRU-forward-empty", 1, (3, 2, 2, 2), **_empty),
]

CASES = [*CONTROL, *ATTENTION, *RECURRENT]
