"""Gradient rules of RNN, GRU and LSTM: the gates are computed again from Y, then time is reversed.

Y has the hidden state of every step, so two matrix products over all steps give all gates. Only the
adjoints are computed step by step, in a Scan whose body is a product and a few elementwise operators.

Source: Werbos, "Backpropagation through time" (1990); Hochreiter and Schmidhuber, "Long short-term
memory" (1997); Cho et al., "Learning phrase representations" (2014).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ortflex_core import Gradient, NodeView, Ops, Rules, Tensor, known_size, zeros_like
from ortflex_plugins.gradients._sequences import (
    Activation,
    Direction,
    activations,
    directions,
    flat,
    previous,
    scan,
    unflat,
)

RULES = Rules()


@attrs.frozen
class _Adjoints:
    """Cotangents of one direction: of the terms of x and h in the gates, of R, h₀, c₀ and peepholes."""

    from_x: Tensor
    from_h: Tensor
    r: Tensor
    h0: Tensor
    c0: Tensor | None = None
    p: Tensor | None = None


_Cell = Callable[[Ops, NodeView, Direction, list[Activation]], _Adjoints]


def _rule(cell: _Cell, gates: int, default: Sequence[str]) -> Callable[..., Sequence[Gradient]]:
    def rule(op: Ops, node: NodeView, *gs: Tensor | None) -> Sequence[Gradient]:
        """The shapes of the weights must be known. With layout=1, Transpose nodes are added."""
        sides = directions(op, node, gates, gs)
        functions = activations(node, default, len(sides))
        adjoints = [cell(op, node, s, functions[k * len(default) :]) for k, s in enumerate(sides)]

        def to_x() -> Tensor:
            pairs = zip(adjoints, sides, strict=True)
            total = functools.reduce(
                operator.add, [op.Gemm(flat(op, a.from_x), s.w) for a, s in pairs]
            )
            return unflat(op, total, node.inputs[0], node.inputs[1].shape[2])

        def to_w() -> Tensor:
            x = flat(op, node.inputs[0])
            return _stack(op, [op.Gemm(flat(op, a.from_x), x, transA=1) for a in adjoints])

        def to_bias() -> Tensor:
            def total(terms: Tensor) -> Tensor:
                return op.ReduceSum(flat(op, terms), axes=[0], keepdims=0)

            return _stack(
                op, [op.Concat(total(a.from_x), total(a.from_h), axis=0) for a in adjoints]
            )

        gradients: list[Gradient] = [
            to_x,
            to_w,
            lambda: _stack(op, [a.r for a in adjoints]),
            to_bias,
            None,
            lambda: _stack(op, [a.h0 for a in adjoints]),
            lambda: _stack(op, [a.c0 for a in adjoints if a.c0 is not None]),
            lambda: _stack(op, [a.p for a in adjoints if a.p is not None]),
        ]
        return gradients[: len(node.inputs)]

    return rule


def _stack(op: Ops, parts: Sequence[Tensor]) -> Tensor:
    rows = [op.Unsqueeze(p, axes=[0]) for p in parts]
    return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)


def _held(op: Ops, raw: Tensor, clip: float | None) -> tuple[Tensor, Tensor | None]:
    """The input of an activation, and a mask: 0 where ``clip`` replaced the input."""
    if clip is None:
        return raw, None
    inside = op.Cast(op.LessOrEqual(op.Abs(raw), clip), to=raw.dtype)
    return op.Clip(raw, -clip, clip), inside


def _activated(
    op: Ops, activation: Activation, raw: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """The value of an activation, and its slope."""
    x, inside = _held(op, raw, clip)
    value = activation.value(op, x)
    slope = activation.slope(op, value)
    return value, slope if inside is None else slope * inside


def _product(op: Ops, x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """X W′ + bias over all steps at once, flattened."""
    terms = (flat(op, x), weights) if bias is None else (flat(op, x), weights, bias)
    return op.Gemm(*terms, transB=1)


def _sum_of_biases(s: Direction) -> Tensor | None:
    """The sum of the biases of X and H, if there are biases."""
    return None if s.input_bias is None or s.hidden_bias is None else s.input_bias + s.hidden_bias


def _gates(op: Ops, s: Direction) -> Tensor:
    """X W′ + H R′ + both biases, for all steps: [T, B, gates · hidden]."""
    from_x = _product(op, s.x, s.w, _sum_of_biases(s))
    total = op.Gemm(flat(op, s.before), s.r, from_x, transB=1)
    return unflat(op, total, s.x, known_size(s.r, 0) or 0)


def _parts(op: Ops, value: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Split along the last axis."""
    return op.Split(value, list(sizes), axis=-1, outputs=len(sizes))


def _through_time(
    s: Direction,
    step: Callable[..., Any],
    states: Sequence[Tensor],
    items: Sequence[Tensor],
    **outer: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run the adjoint of a step from the last step to the first; the cotangent of Y is the first item."""
    from_y = [] if s.g_y is None else [s.g_y]

    def body(op: Ops, now: list[Tensor], at: list[Tensor], fixed: Mapping[str, Tensor]) -> Any:
        dh = now[0] + at[0] if from_y else now[0]
        return step(op, dh, now[1:], at[len(from_y) :], fixed)

    return scan(body, states, [*from_y, *items], outer, backwards=not s.reverse)


def _rnn(op: Ops, node: NodeView, s: Direction, chosen: list[Activation]) -> _Adjoints:
    slope = chosen[0].slope(op, s.y)
    if node.clip is not None:
        inside = _held(op, _gates(op, s), node.clip)[1]
        slope = slope if inside is None else slope * inside
    slope, dead = s.masked(op, slope), s.dead(op)

    def step(op: Ops, dh: Tensor, _: Any, at: list[Tensor], fixed: Any) -> Any:
        da = dh * at[0]
        back = op.MatMul(da, fixed["r"])
        return [back + dh * at[1] if dead else back], [da]

    (h0,), (da,) = _through_time(s, step, [s.g_h], [slope, *dead], r=s.r)
    return _Adjoints(da, da, op.Gemm(flat(op, da), flat(op, s.before), transA=1), h0)


def _lstm(op: Ops, node: NodeView, s: Direction, chosen: list[Activation]) -> _Adjoints:
    """Gates in the order i, o, f, g; c ← f c + i g and h = o tanh c.

    Peepholes add p ∘ c to the inputs of i and f, and p ∘ (the new c) to the input of o. With
    input_forget, f is 1 − i.
    """
    n, (gate, to_g, to_h), clip = s.hidden, chosen[:3], node.clip
    raw = _gates(op, s)
    if s.peephole is None:
        raw_iof, raw_g = _parts(op, raw, (3 * n, n))
        iof, iof_slope = _activated(op, gate, raw_iof, clip)
        i, o, f = _parts(op, iof, (n,) * 3)
        g, g_slope = _activated(op, to_g, raw_g, clip)
        f = 1 - i if node.input_forget else f
        keep = s.masked(op, f, 1.0)
        # The cell states cannot be computed from the hidden states.
        _, (c,) = scan(_cell_step, [s.c0], [keep, s.masked(op, i * g)], {}, backwards=s.reverse)
        c_before = previous(op, c, s.c0, s.reverse)
    else:
        raw_i, raw_o, raw_f, raw_g = _parts(op, raw, (n,) * 4)
        p_i, p_o, p_f = _parts(op, s.peephole, (n,) * 3)
        g, g_slope = _activated(op, to_g, raw_g, clip)
        forget = [] if node.input_forget else [raw_f]
        alive = [] if s.alive is None else [s.alive]

        def cell(op: Ops, now: list[Tensor], at: list[Tensor], fixed: Any) -> Any:
            i, _ = _activated(op, gate, at[0] + fixed["i"] * now[0], clip)
            if forget:
                f, _ = _activated(op, gate, at[2] + fixed["f"] * now[0], clip)
            else:
                f = 1 - i
            c = f * now[0] + i * at[1]
            c = op.Where(at[-1], c, now[0]) if alive else c
            return [c], [c]

        outer = {"i": p_i} | ({"f": p_f} if forget else {})
        items = [raw_i, g, *forget, *alive]
        _, (c,) = scan(cell, [s.c0], items, outer, backwards=s.reverse)
        c_before = previous(op, c, s.c0, s.reverse)
        i, i_slope = _activated(op, gate, raw_i + p_i * c_before, clip)
        f, f_slope = _activated(op, gate, raw_f + p_f * c_before, clip)
        o, o_slope = _activated(op, gate, raw_o + p_o * c, clip)
        iof_slope = op.Concat(i_slope, o_slope, f_slope, axis=-1)
        keep = 1 - i if node.input_forget else f
    tanh_c = to_h.value(op, c)
    to_c = o * to_h.slope(op, tanh_c)
    # The factors of dc, dh and dc in the cotangents of i, o and f.
    if node.input_forget:
        seen = op.Concat(g - c_before, tanh_c, zeros_like(op, g), axis=-1)
    else:
        seen = op.Concat(g, tanh_c, c_before, axis=-1)
    pulls = seen * iof_slope
    if s.peephole is not None:
        pull_i, pull_o, pull_f = _parts(op, pulls, (n,) * 3)
        to_c = to_c + p_o * pull_o
        keep = s.masked(op, keep + p_i * pull_i + p_f * pull_f, 1.0)
    slopes = s.masked(op, op.Concat(pulls, i * g_slope, axis=-1))
    to_c, dead = s.masked(op, to_c), s.dead(op)

    def step(op: Ops, dh: Tensor, now: list[Tensor], at: list[Tensor], fixed: Any) -> Any:
        dc = now[0] + dh * at[1]
        da = op.Concat(dc, dh, dc, dc, axis=-1) * at[0]
        back = op.MatMul(da, fixed["r"])
        return [back + dh * at[3] if dead else back, dc * at[2]], [da]

    items = [slopes, to_c, keep, *dead]
    (h0, c0), (da,) = _through_time(s, step, [s.g_h, s.g_c], items, r=s.r)
    to_p = None
    if s.peephole is not None:
        da_i, da_o, da_f, _ = _parts(op, da, (n,) * 4)
        seen = op.Concat(da_i * c_before, da_o * c, da_f * c_before, axis=-1)
        to_p = op.ReduceSum(seen, axes=[0, 1], keepdims=0)
    return _Adjoints(da, da, op.Gemm(flat(op, da), flat(op, s.before), transA=1), h0, c0, to_p)


def _cell_step(op: Ops, now: list[Tensor], at: list[Tensor], _: Any) -> Any:
    c = now[0] * at[0] + at[1]
    return [c], [c]


def _gru(op: Ops, node: NodeView, s: Direction, chosen: list[Activation]) -> _Adjoints:
    """Gates in the order z, r, h; H = (1 − z) n + z H₋ with n from x and r ∘ H₋."""
    cell = _gru_reset_after if node.linear_before_reset else _gru_reset_before
    return cell(op, s, chosen, node.clip)


def _gru_reset_after(
    op: Ops, s: Direction, chosen: list[Activation], clip: float | None
) -> _Adjoints:
    """With n = tanh(x W′ + r ∘ (H₋ R′ + b)): H₋ R′ is one product for all gates, and so is its adjoint."""
    n = s.hidden
    from_x = unflat(op, _product(op, s.x, s.w, s.input_bias), s.x, 3 * n)
    from_h = unflat(op, _product(op, s.before, s.r, s.hidden_bias), s.x, 3 * n)
    x_zr, x_n = _parts(op, from_x, (2 * n, n))
    h_zr, h_n = _parts(op, from_h, (2 * n, n))
    zr, zr_slope = _activated(op, chosen[0], x_zr + h_zr, clip)
    z, r = _parts(op, zr, (n, n))
    new, new_slope = _activated(op, chosen[1], x_n + r * h_n, clip)
    to_n = (1 - z) * new_slope
    slopes = op.Concat(s.before - new, to_n * h_n, axis=-1) * zr_slope
    into_h = s.masked(op, op.Concat(slopes, to_n * r, axis=-1))
    into_x = s.masked(op, op.Concat(slopes, to_n, axis=-1))

    def step(op: Ops, dh: Tensor, _: Any, at: list[Tensor], fixed: Any) -> Any:
        da = op.Concat(dh, dh, dh, axis=-1) * at[0]
        return [op.MatMul(da, fixed["r"]) + dh * at[1]], [dh]

    keep = s.masked(op, z, 1.0)
    (h0,), (dh,) = _through_time(s, step, [s.g_h], [into_h, keep], r=s.r)
    three = op.Concat(dh, dh, dh, axis=-1)
    da_h = three * into_h
    gradient = op.Gemm(flat(op, da_h), flat(op, s.before), transA=1)
    return _Adjoints(three * into_x, da_h, gradient, h0)


def _gru_reset_before(
    op: Ops, s: Direction, chosen: list[Activation], clip: float | None
) -> _Adjoints:
    """With n = tanh(x W′ + (r ∘ H₋) R′ + b): the adjoint of the reset gate needs the adjoint of n."""
    n = s.hidden
    from_x = unflat(op, _product(op, s.x, s.w, _sum_of_biases(s)), s.x, 3 * n)
    x_zr, x_n = _parts(op, from_x, (2 * n, n))
    r_zr, r_n = op.Split(s.r, [2 * n, n], axis=0, outputs=2)
    h_zr = unflat(op, _product(op, s.before, r_zr, None), s.x, 2 * n)
    zr, zr_slope = _activated(op, chosen[0], x_zr + h_zr, clip)
    z, r = _parts(op, zr, (n, n))
    reset = r * s.before
    h_n = unflat(op, _product(op, reset, r_n, None), s.x, n)
    new, new_slope = _activated(op, chosen[1], x_n + h_n, clip)
    to_n = s.masked(op, (1 - z) * new_slope)
    slopes = s.masked(op, op.Concat(s.before - new, s.before, axis=-1) * zr_slope)

    def step(op: Ops, dh: Tensor, _: Any, at: list[Tensor], fixed: Any) -> Any:
        da_n = dh * at[0]
        d_reset = op.MatMul(da_n, fixed["r_n"])
        da_zr = op.Concat(dh, d_reset, axis=-1) * at[1]
        back = op.MatMul(da_zr, fixed["r_zr"]) + dh * at[2] + d_reset * at[3]
        return [back], [op.Concat(da_zr, da_n, axis=-1)]

    items = [to_n, slopes, s.masked(op, z, 1.0), r]
    (h0,), (da,) = _through_time(s, step, [s.g_h], items, r_n=r_n, r_zr=r_zr)
    da_zr, da_n = _parts(op, da, (2 * n, n))
    gradient = op.Concat(
        op.Gemm(flat(op, da_zr), flat(op, s.before), transA=1),
        op.Gemm(flat(op, da_n), flat(op, reset), transA=1),
        axis=0,
    )
    return _Adjoints(da, da, gradient, h0)


RULES.rule("RNN", attributes=("hidden_size",))(_rule(_rnn, 1, ("Tanh",)))
RULES.rule("GRU", attributes=("hidden_size",))(_rule(_gru, 3, ("Sigmoid", "Tanh")))
RULES.rule("LSTM", attributes=("hidden_size",))(_rule(_lstm, 4, ("Sigmoid", "Tanh", "Tanh")))
