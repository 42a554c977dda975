"""Gradient rules of RNN, GRU and LSTM: what happened is computed again from Y, then run backwards.

Y has the hidden state of every step, so all gates come out of two matrix products over all steps
at once. Only the adjoints have to go step by step, in a Scan whose body is a product and a few
elementwise operators.

Source: Werbos, "Backpropagation through time" (1990); Hochreiter and Schmidhuber, "Long short-term
memory" (1997); Cho et al., "Learning phrase representations" (2014).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ortflex_core.autodiff import Gradient, NodeView, Rules
from ortflex_core.errors import NoGradientRule
from ortflex_core.ops import Ops, Tensor
from ortflex_plugins.gradients._scan import scan
from ortflex_plugins.gradients._sequences import Direction, directions, flat, previous, unflat

RULES = Rules()

# The derivative of an activation, written with its value.
_SLOPES: Mapping[str, Callable[[Ops, Tensor], Tensor]] = {
    "Sigmoid": lambda op, y: y * (1 - y),
    "Tanh": lambda op, y: 1 - y * y,
    "Relu": lambda op, y: op.Sign(y),
}


@attrs.frozen
class _Adjoints:
    """Cotangents of one direction: of what x and h add to the gates, of R and of the start."""

    from_x: Tensor
    from_h: Tensor
    r: Tensor
    h0: Tensor
    c0: Tensor | None = None


_Cell = Callable[[Ops, NodeView, Direction, list[str]], _Adjoints]


def _rule(cell: _Cell, gates: int, default: Sequence[str]) -> Callable[..., Sequence[Gradient]]:
    def rule(op: Ops, node: NodeView, *gs: Tensor | None) -> Sequence[Gradient]:
        sides = directions(op, node, gates, gs)
        names = _activations(node, default, len(sides))
        found = [cell(op, node, s, names[k * len(default) :]) for k, s in enumerate(sides)]

        def to_x() -> Tensor:
            parts = [op.Gemm(flat(op, a.from_x), s.w) for a, s in zip(found, sides, strict=True)]
            total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            return unflat(op, total, node.inputs[0], s_size(sides[0]))

        def s_size(side: Direction) -> int:
            assert side.w.shape is not None
            return int(side.w.shape[1] or 0)

        def to_w() -> Tensor:
            pairs = zip(found, sides, strict=True)
            return _stack(
                op, [op.Gemm(flat(op, a.from_x), flat(op, s.x), transA=1) for a, s in pairs]
            )

        def to_bias() -> Tensor:
            sums = [
                [op.ReduceSum(flat(op, t), axes=[0], keepdims=0) for t in (a.from_x, a.from_h)]
                for a in found
            ]
            return _stack(op, [op.Concat(*pair, axis=0) for pair in sums])

        answers: list[Gradient] = [
            to_x,
            to_w,
            lambda: _stack(op, [a.r for a in found]),
            to_bias,
            None,
            lambda: _stack(op, [a.h0 for a in found]),
            lambda: _stack(op, [a.c0 for a in found if a.c0 is not None]),
        ]
        return [*answers, None][: len(node.inputs)]

    return rule


def _stack(op: Ops, parts: Sequence[Tensor]) -> Tensor:
    rows = [op.Unsqueeze(p, axes=[0]) for p in parts]
    return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=0)  # type: ignore[no-any-return]


def _activations(node: NodeView, default: Sequence[str], sides: int) -> list[str]:
    given = node.activations or []
    names = [n.decode() if isinstance(n, bytes) else n for n in given]
    names = [n.capitalize() for n in names[: len(default) * sides]] or [*default] * sides
    unknown = [n for n in names if n not in _SLOPES]
    if unknown:
        raise NoGradientRule(f"with the activation {unknown[0]!r}")
    return names


def _product(op: Ops, x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """X W′ + bias over all steps at once, flattened."""
    terms = (flat(op, x), weights) if bias is None else (flat(op, x), weights, bias)
    return op.Gemm(*terms, transB=1)  # type: ignore[no-any-return]


def _gates(op: Ops, s: Direction) -> Tensor:
    """X W′ + H R′ + both biases, for all steps: [T, B, gates · hidden]."""
    biases = None if s.input_bias is None else s.input_bias + s.hidden_bias
    both = op.Gemm(flat(op, s.before), s.r, _product(op, s.x, s.w, biases), transB=1)
    assert s.r.shape is not None
    return unflat(op, both, s.x, int(s.r.shape[0] or 0))


def _parts(op: Ops, value: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Split along the last axis."""
    return op.Split(value, list(sizes), axis=-1, outputs=len(sizes))  # type: ignore[no-any-return]


def _through_time(
    s: Direction,
    step: Callable[..., Any],
    states: Sequence[Tensor],
    items: Sequence[Tensor],
    **outer: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a step's adjoint from the last step to the first; Y's cotangent is the first item."""
    given = [] if s.g_y is None else [s.g_y]

    def body(op: Ops, now: list[Tensor], at: list[Tensor], fixed: Mapping[str, Tensor]) -> Any:
        dh = now[0] if s.g_y is None else now[0] + at[0]
        return step(op, dh, now[1:], at[len(given) :], fixed)

    return scan(body, states, [*given, *items], outer, backwards=not s.reverse)


def _rnn(op: Ops, node: NodeView, s: Direction, names: list[str]) -> _Adjoints:
    slope = s.masked(op, _SLOPES[names[0]](op, s.y))
    dead = [] if s.alive is None else [op.Cast(op.Not(s.alive), to=slope.dtype)]

    def step(op: Ops, dh: Tensor, _: Any, at: list[Tensor], fixed: Any) -> Any:
        da = dh * at[0]
        back = op.MatMul(da, fixed["r"])
        return [back + dh * at[1] if dead else back], [da]

    (h0,), (da,) = _through_time(s, step, [s.g_h], [slope, *dead], r=s.r)
    return _Adjoints(da, da, op.Gemm(flat(op, da), flat(op, s.before), transA=1), h0)


def _lstm(op: Ops, node: NodeView, s: Direction, names: list[str]) -> _Adjoints:
    """Gates in the order i, o, f, c; c ← f c + i g and h = o tanh c."""
    if node.input(7) is not None:
        raise NoGradientRule("with peepholes")
    if node.input_forget:
        raise NoGradientRule("with input_forget=1")
    n, (f_name, g_name, h_name) = s.hidden, names[:3]
    raw_iof, raw_g = _parts(op, _gates(op, s), (3 * n, n))
    iof, g = op(f_name, raw_iof), op(g_name, raw_g)
    i, o, f = _parts(op, iof, (n, n, n))
    keep = f if s.alive is None else op.Where(s.alive, f, 1.0)
    # The hidden states do not tell the cell's.
    _, (c,) = scan(_cell_step, [s.c0], [keep, s.masked(op, i * g)], {}, backwards=s.reverse)
    c_before = previous(op, c, s.c0, s.reverse)
    tanh_c = op(h_name, c)
    slopes = op.Concat(g, tanh_c, c_before, axis=-1) * _SLOPES[f_name](op, iof)
    slopes = s.masked(op, op.Concat(slopes, i * _SLOPES[g_name](op, g), axis=-1))
    to_c = s.masked(op, o * _SLOPES[h_name](op, tanh_c))
    dead = [] if s.alive is None else [op.Cast(op.Not(s.alive), to=to_c.dtype)]

    def step(op: Ops, dh: Tensor, now: list[Tensor], at: list[Tensor], fixed: Any) -> Any:
        dc = now[0] + dh * at[1]
        da = op.Concat(dc, dh, dc, dc, axis=-1) * at[0]
        back = op.MatMul(da, fixed["r"])
        return [back + dh * at[3] if dead else back, dc * at[2]], [da]

    items = [slopes, to_c, keep, *dead]
    (h0, c0), (da,) = _through_time(s, step, [s.g_h, s.g_c], items, r=s.r)
    return _Adjoints(da, da, op.Gemm(flat(op, da), flat(op, s.before), transA=1), h0, c0)


def _cell_step(op: Ops, now: list[Tensor], at: list[Tensor], _: Any) -> Any:
    c = now[0] * at[0] + at[1]
    return [c], [c]


def _gru(op: Ops, node: NodeView, s: Direction, names: list[str]) -> _Adjoints:
    """Gates in the order z, r, h; H = (1 − z) n + z H₋ with n from x and r ∘ H₋."""
    cell = _gru_reset_after if node.linear_before_reset else _gru_reset_before
    return cell(op, s, names)


def _gru_reset_after(op: Ops, s: Direction, names: list[str]) -> _Adjoints:
    """With n = tanh(x W′ + r ∘ (H₋ R′ + b)): all of H₋ R′ is one product, and so is its adjoint."""
    n, (f_name, g_name) = s.hidden, names[:2]
    from_x = unflat(op, _product(op, s.x, s.w, s.input_bias), s.x, 3 * n)
    from_h = unflat(op, _product(op, s.before, s.r, s.hidden_bias), s.x, 3 * n)
    x_zr, x_n = _parts(op, from_x, (2 * n, n))
    h_zr, h_n = _parts(op, from_h, (2 * n, n))
    zr = op(f_name, x_zr + h_zr)
    z, r = _parts(op, zr, (n, n))
    new = op(g_name, x_n + r * h_n)
    to_n = (1 - z) * _SLOPES[g_name](op, new)
    slopes = op.Concat(s.before - new, to_n * h_n, axis=-1) * _SLOPES[f_name](op, zr)
    into_h = s.masked(op, op.Concat(slopes, to_n * r, axis=-1))
    into_x = s.masked(op, op.Concat(slopes, to_n, axis=-1))

    def step(op: Ops, dh: Tensor, _: Any, at: list[Tensor], fixed: Any) -> Any:
        da = op.Concat(dh, dh, dh, axis=-1) * at[0]
        return [op.MatMul(da, fixed["r"]) + dh * at[1]], [dh]

    keep = z if s.alive is None else op.Where(s.alive, z, 1.0)
    (h0,), (dh,) = _through_time(s, step, [s.g_h], [into_h, keep], r=s.r)
    three = op.Concat(dh, dh, dh, axis=-1)
    da_h = three * into_h
    gradient = op.Gemm(flat(op, da_h), flat(op, s.before), transA=1)
    return _Adjoints(three * into_x, da_h, gradient, h0)


def _gru_reset_before(op: Ops, s: Direction, names: list[str]) -> _Adjoints:
    """With n = tanh(x W′ + (r ∘ H₋) R′ + b): the reset's adjoint waits for that of n."""
    n, (f_name, g_name) = s.hidden, names[:2]
    biases = None if s.input_bias is None else s.input_bias + s.hidden_bias
    from_x = unflat(op, _product(op, s.x, s.w, biases), s.x, 3 * n)
    x_zr, x_n = _parts(op, from_x, (2 * n, n))
    r_zr, r_n = op.Split(s.r, [2 * n, n], axis=0, outputs=2)
    zr = op(f_name, x_zr + unflat(op, _product(op, s.before, r_zr, None), s.x, 2 * n))
    z, r = _parts(op, zr, (n, n))
    reset = r * s.before
    new = op(g_name, x_n + unflat(op, _product(op, reset, r_n, None), s.x, n))
    to_n = s.masked(op, (1 - z) * _SLOPES[g_name](op, new))
    slopes = op.Concat(s.before - new, s.before, axis=-1) * _SLOPES[f_name](op, zr)
    slopes = s.masked(op, slopes)

    def step(op: Ops, dh: Tensor, _: Any, at: list[Tensor], fixed: Any) -> Any:
        da_n = dh * at[0]
        d_reset = op.MatMul(da_n, fixed["r_n"])
        da_zr = op.Concat(dh, d_reset, axis=-1) * at[1]
        back = op.MatMul(da_zr, fixed["r_zr"]) + dh * at[2] + d_reset * at[3]
        return [back], [op.Concat(da_zr, da_n, axis=-1)]

    keep = z if s.alive is None else op.Where(s.alive, z, 1.0)
    items = [to_n, slopes, keep, r]
    (h0,), (da,) = _through_time(s, step, [s.g_h], items, r_n=r_n, r_zr=r_zr)
    da_zr, da_n = _parts(op, da, (2 * n, n))
    gradient = op.Concat(
        op.Gemm(flat(op, da_zr), flat(op, s.before), transA=1),
        op.Gemm(flat(op, da_n), flat(op, reset), transA=1),
        axis=0,
    )
    return _Adjoints(da, da, gradient, h0)


RULES.rule("RNN")(_rule(_rnn, 1, ("Tanh",)))
RULES.rule("GRU")(_rule(_gru, 3, ("Sigmoid", "Tanh")))
RULES.rule("LSTM")(_rule(_lstm, 4, ("Sigmoid", "Tanh", "Tanh")))
