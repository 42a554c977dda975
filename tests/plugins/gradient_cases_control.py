"""Cases of If, Loop and Scan, written as text; FLOAT stands for the type of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser

from ortflex_core.compiler.graph import control_flow
from tests.gradcheck import data
from tests.plugins.gradient_cases import Case, case


def text(name: str, source: str, **options: Any) -> Case:
    """A case whose formula is the body of a graph that computes y."""

    def formula(op: Any, **inputs: Any) -> Any:
        dtype = next(t.dtype for t in inputs.values() if t.is_float)
        kind = {1: "float", 11: "double"}[dtype]
        formals = ", ".join(
            f"{kind if t.is_float else {7: 'int64', 9: 'bool'}[t.dtype]} {n}"
            for n, t in inputs.items()
        )
        graph = onnx.parser.parse_graph(
            f"g ({formals}) => ({kind} y) {{ {source.replace('FLOAT', kind + '[]')} }}"
        )
        (y,) = control_flow.replay(op._trace, graph, list(inputs.values()), {})
        return y

    return case(name, formula, needs_rank=True, **options)


_x, _w, _square = data(2, 3), data(3, seed=1), data(3, 3, seed=2)

_IF = """
    h = Mul(x, w)
    y = If(c) <
        then_branch = t () => (FLOAT a) { e = Exp(h) a = Mul(e, w) },
        else_branch = f () => (FLOAT b) { b = Tanh(x) }
    >
"""
# The state goes out and comes in, and what each iteration gives is summed.
_LOOP = """
    last, every = Loop(n, , x) <
        body = b (int64 i, bool go, FLOAT s) => (bool on, FLOAT t, FLOAT out) {
            on = Identity(go)
            m = MatMul(s, w)
            t = Tanh(m)
            out = Mul(t, x)
        }
    >
    first = Constant <value = int64[1] {0}> ()
    total = ReduceSum <keepdims = 0> (every, first)
    y = Add(total, last)
"""
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


def scan(axis: int, back: int, to_axis: int, to_back: int) -> Case:
    source = """
        last, every = Scan <
            body = b (FLOAT s, FLOAT x) => (FLOAT t, FLOAT out) {
                m = MatMul(s, w)
                q = Add(m, x)
                t = Tanh(q)
                out = Mul(t, x)
            },
            num_scan_inputs = 1, scan_input_axes = [%d], scan_input_directions = [%d],
            scan_output_axes = [%d], scan_output_directions = [%d]
        > (s0, xs)
        place = Constant <value = int64[1] {%d}> ()
        end = Unsqueeze(last, place)
        y = Mul(every, end)
    """
    shape = {0: (40, 1, 3), 1: (1, 40, 3)}[axis]
    return text(
        f"Scan-{axis}{back}{to_axis}{to_back}",
        source % (axis, back, to_axis, to_back, to_axis),
        **{"s0": data(1, 3), "xs": data(*shape, seed=3) / 4, "w": _square},
    )


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


CASES = [
    *(
        text(f"Sequences-{k}-at{p}", chunks(k), x=_x[:2], place=np.array(p))
        for k, p in ((1, 1), (1, -2), (2, 0), (2, -1))
    ),
    text("Sequences-rows", _ROWS, x=data(2, 3, 2), place=np.array(-2)),
    text("Sequences", _SEQUENCES, x=data(2, 3, seed=5)),
    text("Sequences-growing", _GROWING, x=_x, w=_square),
    *(text(f"If-{c}", _IF, x=_x, c=np.array(c), w=_w) for c in (True, False)),
    *(text(f"Loop-{n}", _LOOP, x=_x, n=np.array(n), w=_square) for n in (1, 4)),
    text("Loop-while", _WHILE, x=_x, n=np.array(10), c=np.array(True), w=_w),
    text("Loop-stopped", _WHILE, x=_x, n=np.array(10), c=np.array(False), w=_w),
    text("Loop-constant", "n = Constant <value = int64 {3}> ()" + _LOOP, x=_x, w=_square),
    scan(0, 0, 0, 0),
    scan(1, 1, 1, 1),
    scan(0, 1, 2, 0),
    scan(1, 0, 0, 1),
]
