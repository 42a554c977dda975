"""Draws of If, Loop and Scan: sizes, numbers of iterations, axes, directions, what a body reads."""

from __future__ import annotations

import re
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np
import onnx.parser

from ortflex_core.compiler.graph import control_flow
from tests.plugins.gradient_cases import Case, case
from tests.plugins.gradient_draws import Draw, Draws, numbers, torch

DRAWS = Draws()


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


# One operator of a body on h, next to an outer w; the same in torch.
STEPS = {
    "Tanh(h)": lambda h, w: h.tanh(),
    "Sigmoid(h)": lambda h, w: h.sigmoid(),
    "Mul(h, w)": lambda h, w: h * w,
    "Sub(w, h)": lambda h, w: w - h,
    "Mul(h, h)": lambda h, w: h * h,
}


def steps(draw: Draw, low: int = 1, high: int = 3) -> tuple[str, Any]:
    """A chain from h to r, as text with names of its own, and in torch."""
    chosen = draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=low, max_size=high))
    lines, name = [], "h"
    for k, step in enumerate(chosen):
        following = f"h{k}"
        lines.append(f"{following} = " + re.sub(r"\bh\b", name, step))
        name = following

    def in_torch(h: Any, w: Any) -> Any:
        for step in chosen:
            h = STEPS[step](h, w)
        return h

    return " ".join([*lines, f"r = Tanh({name})"]), lambda h, w: in_torch(h, w).tanh()


def made(case: Case, label: str, in_torch: Any) -> Case:
    return attrs.evolve(case, name=label, torch=in_torch)


@DRAWS.of("If")
def conditional(draw: Draw, operator: str) -> Case:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    (left, f), (right, g) = steps(draw), steps(draw)
    taken = draw(st.booleans())
    source = f"""
        h = Mul(x, w)
        y = If(c) < then_branch = t () => (FLOAT r) {{ {left} }},
                    else_branch = e () => (FLOAT r) {{ {right} }} >
    """
    arrays = {"x": numbers(draw, (rows, columns)), "w": numbers(draw, (columns,), salt=1)}
    found = text("If", source, c=np.array(taken), **arrays)
    return made(
        found, f"If {taken} {left} / {right}", lambda x, w, c: (f if taken else g)(x * w, w)
    )


@DRAWS.of("Loop")
def loop(draw: Draw, operator: str) -> Case:
    """A state and what each iteration gives; no iteration, too, of which there are no sums."""
    size, count = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    body, f = steps(draw)
    known = draw(st.booleans())
    source = f"""
        last, every = Loop(n, , x) <
            body = b (int64 i, bool go, FLOAT s) => (bool on, FLOAT t, FLOAT out) {{
                on = Identity(go)
                h = MatMul(s, m)
                {body}
                t = Add(r, s)
                out = Mul(t, x)
            }}
        >
        first = Constant <value = int64[1] {{0}}> ()
        {"total = ReduceSum <keepdims = 0> (every, first)" if count else "total = Neg(x)"}
        y = Add(total, last)
    """
    arrays: dict[str, Any] = {
        "x": numbers(draw, (draw(st.integers(1, 2)), size)),
        "w": numbers(draw, (size,), salt=1),
        "m": numbers(draw, (size, size), -1, 1, salt=2),
    }
    if known:
        source = f"n = Constant <value = int64 {{{count}}}> ()" + source
    else:
        arrays["n"] = np.array(count)
    if not re.search(r"\bw\b", body):
        arrays.pop("w")

    def in_torch(x: Any, m: Any, w: Any = None, n: Any = None) -> Any:
        state, total = x, torch.zeros_like(x)
        for _ in range(count):
            state = f(state @ m, w) + state
            total = total + state * x
        return (total if count else -x) + state

    return made(text("Loop", source, **arrays), f"Loop {count} known={known} {body}", in_torch)


@DRAWS.of("Scan")
def scan(draw: Draw, operator: str) -> Case:
    """Two sequences, each along an axis and in a direction of its own."""
    size, count = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3, 40]))
    body, f = steps(draw)
    axes = [draw(st.integers(0, 1)) for _ in range(2)]
    to_axis = draw(st.integers(0, 1))
    turned = [draw(st.integers(0, 1)) for _ in range(3)]
    source = f"""
        last, every = Scan <
            body = b (FLOAT s, FLOAT a, FLOAT c) => (FLOAT t, FLOAT out) {{
                p = Mul(a, c)
                h = Add(s, p)
                {body}
                t = Add(r, s)
                out = Mul(t, a)
            }},
            num_scan_inputs = 2, scan_input_axes = [{axes[0]}, {axes[1]}],
            scan_input_directions = [{turned[0]}, {turned[1]}],
            scan_output_axes = [{to_axis}], scan_output_directions = [{turned[2]}]
        > (s0, xs, zs)
        place = Constant <value = int64[1] {{{to_axis}}}> ()
        end = Unsqueeze(last, place)
        y = Mul(every, end)
    """
    shapes = [(count, size) if axis == 0 else (size, count) for axis in axes]
    arrays = {
        "s0": numbers(draw, (size,)),
        "xs": numbers(draw, shapes[0], salt=1),
        "zs": numbers(draw, shapes[1], salt=2),
        "w": numbers(draw, (size,), salt=3),
    }
    if not re.search(r"\bw\b", body):
        arrays.pop("w")

    def in_torch(s0: Any, xs: Any, zs: Any, w: Any = None) -> Any:
        parts = [list(v.unbind(axis)) for v, axis in zip((xs, zs), axes, strict=True)]
        first, second = (p[::-1] if back else p for p, back in zip(parts, turned, strict=False))
        state, outs = s0, []
        for a, c in zip(first, second, strict=True):
            state = f(state + a * c, w) + state
            outs.append(state * a)
        every = torch.stack(outs[::-1] if turned[2] else outs, to_axis)
        return every * state.unsqueeze(to_axis)

    label = f"Scan {count} {axes} {to_axis} {turned} {body}"
    return made(text("Scan", source, **arrays), label, in_torch)
