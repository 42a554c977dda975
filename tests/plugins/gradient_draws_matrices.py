"""Draws of matrix products, Einsum, determinants, Fourier transforms, reductions and running sums."""

from __future__ import annotations

import string
from typing import Any

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import numpy as np

from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import (
    F32,
    Draw,
    Draws,
    axes_of,
    axis_of,
    drawn,
    numbers,
    shapes,
    tenths,
    torch,
)
from tests.tracing import NEWEST

DRAWS = Draws()


@DRAWS.of("MatMul")
def matmul(draw: Draw, operator: str) -> Case:
    found = draw(
        npst.mutually_broadcastable_shapes(
            signature="(m?,k),(k,n?)->(m?,n?)", max_dims=2, max_side=3
        )
    )
    a, b = found.input_shapes
    return drawn(
        "MatMul",
        lambda op, a, b: op.MatMul(a, b),
        {"a": numbers(draw, a), "b": numbers(draw, b, salt=1)},
        needs_rank=True,
        torch=lambda a, b: a @ b,
    )


@DRAWS.of("Gemm")
def gemm(draw: Draw, operator: str) -> Case:
    m, k, n = (draw(st.integers(1, 3)) for _ in range(3))
    ta, tb = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    options = {"alpha": draw(tenths(-15, 15)), "beta": draw(tenths(-15, 15))}
    options |= {"transA": ta, "transB": tb}
    arrays = {
        "a": numbers(draw, (k, m) if ta else (m, k)),
        "b": numbers(draw, (n, k) if tb else (k, n), salt=1),
    }
    third = draw(st.sampled_from([None, (), (1,), (n,), (1, 1), (1, n), (m, 1), (m, n)]))
    if third is not None:
        arrays["c"] = numbers(draw, third, salt=2)

    def in_torch(a: Any, b: Any, c: Any = None) -> Any:
        y = options["alpha"] * ((a.T if ta else a) @ (b.T if tb else b))
        return y if c is None else y + options["beta"] * c

    return drawn(
        f"Gemm {options}",
        lambda op, a, b, c=None: op.Gemm(a, b, c, **options),
        arrays,
        torch=in_torch,
    )


@DRAWS.of("Einsum")
def einsum(draw: Draw, operator: str) -> Case:
    """Letters in any order, repeated in an operand, summed away; an ellipsis; no arrow."""
    sizes = {letter: draw(st.integers(1, 3)) for letter in "ijkl"}
    count = draw(st.integers(1, 3))
    terms = [draw(st.text("ijkl", max_size=3)) for _ in range(count)]
    dots = [draw(st.integers(0, 3)) == 0 for _ in terms]
    front = draw(shapes(0, 2))
    arrays, spelled = {}, []
    for k, (term, dotted) in enumerate(zip(terms, dots, strict=True)):
        hidden = ()
        if dotted:
            hidden = tuple(1 if draw(st.booleans()) else d for d in front)
            at = draw(st.integers(0, len(term)))
            spelled.append(term[:at] + "..." + term[at:])
        else:
            at = 0
            spelled.append(term)
        own = [sizes[c] for c in term]
        arrays[f"x{k}"] = numbers(draw, (*own[:at], *hidden, *own[at:]), salt=k)
    letters = sorted(set("".join(terms)))
    left = ",".join(spelled)
    equation, whole = left, left
    if draw(st.booleans()):
        kept_ = draw(st.lists(st.sampled_from(letters), unique=True)) if letters else []
        right = "".join(kept_)
        if any(dots):
            at = draw(st.integers(0, len(right)))
            right = right[:at] + "..." + right[at:]
        equation = whole = f"{left}->{right}"
    else:
        every = "".join(terms)
        right = "".join(c for c in string.ascii_lowercase if every.count(c) == 1)
        whole = f"{left}->{'...' if any(dots) else ''}{right}"
    if draw(st.booleans()):  # spaces mean nothing
        equation = equation.replace(",", ", ").replace("->", " -> ")
    return drawn(
        f"Einsum {equation}",
        lambda op, **xs: op.Einsum(*xs.values(), equation=equation),
        arrays,
        needs_rank=True,
        torch=lambda **xs: torch.einsum(whole, *xs.values()),
    )


@DRAWS.of("Det")
def det(draw: Draw, operator: str) -> Case:
    size, batch = draw(st.integers(1, 3)), draw(shapes(0, 2, side=2))
    return drawn(
        "Det",
        lambda op, x: op.Det(x),
        {"x": numbers(draw, (*batch, size, size))},
        dtypes=F32,
        oracle=lambda x: np.linalg.det(x),
        torch=lambda x: torch.linalg.det(x),
    )


@DRAWS.of("DFT")
def dft(draw: Draw, operator: str) -> Case:
    """Whole or half spectra of real or complex signals, cut or filled up, and back."""
    parts, size = draw(st.integers(1, 2)), draw(st.integers(2, 6))
    # Older runtimes refuse to make a real signal of half a spectrum.
    kinds = ["forward", "inverse", "onesided", *(["real"] if NEWEST >= 26 else [])]
    kind = draw(st.sampled_from(kinds))
    if kind in ("onesided", "real"):
        parts = 2 if kind == "real" else 1
    front, behind = draw(shapes(1, 1, side=2)), draw(shapes(0, 1, side=2))
    axis = len(front)
    length = draw(st.none() | st.integers(2, 7))
    options = {} if kind == "forward" else {kind: 1}
    if kind == "real":
        options = {"inverse": 1, "onesided": 1}
        length = draw(st.sampled_from([None, 2 * size - 2, 2 * size - 1]))

    arrays = {"x": numbers(draw, (*front, size, *behind, parts))}
    # An axis that is an input, and a length, need not be constant.
    since = 20 if kind == "real" else 17
    if draw(st.booleans()) and kind != "real":
        since, arrays["at"] = 20, np.array(axis)
    if length is not None and draw(st.booleans()):
        arrays["n"] = np.array(length)

    def formula(op: Any, x: Any, at: Any = axis, n: Any = length) -> Any:
        return op.DFT(
            x, *([] if n is None else [op.constant(n)] if n is length else [n]), axis=at, **options
        )

    def in_torch(x: Any, at: Any = None, n: Any = None) -> Any:
        z = torch.complex(x[..., 0], x[..., 1] if parts == 2 else torch.zeros_like(x[..., 0]))
        if kind == "real":
            return torch.fft.irfft(z, n=length, dim=axis).unsqueeze(-1)
        f = torch.fft.ifft if kind == "inverse" else torch.fft.fft
        y = f(z, n=length, dim=axis)
        if kind == "onesided":
            y = y.narrow(axis, 0, (length or size) // 2 + 1)
        return torch.view_as_real(y)

    return drawn(f"DFT {kind} {length} {axis}", formula, arrays, since=since, torch=in_torch)


@DRAWS.of("STFT")
def stft(draw: Draw, operator: str) -> Case:
    length, hop = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    size = length + draw(st.integers(0, 5))
    onesided, parts = draw(st.integers(0, 1)), draw(st.integers(1, 2))
    parts = 1 if onesided else parts
    windowed = draw(st.booleans())
    arrays = {"x": numbers(draw, (draw(st.integers(1, 2)), size, parts))}
    if windowed:
        arrays["w"] = numbers(draw, (length,), 0.3, 1.0)

    if draw(st.booleans()):
        arrays |= {"step": np.array(hop), "count": np.array(length)}

    def formula(op: Any, x: Any, w: Any = None, step: Any = hop, count: Any = length) -> Any:
        return op.STFT(x, step, w, count, onesided=onesided)

    def in_torch(x: Any, w: Any = 1.0, step: Any = None, count: Any = None) -> Any:
        z = torch.complex(x[..., 0], x[..., 1] if parts == 2 else torch.zeros_like(x[..., 0]))
        y = torch.fft.fft(z.unfold(1, length, hop) * w, dim=2)
        return torch.view_as_real(y[..., : length // 2 + 1] if onesided else y)

    def oracle(x: Any, w: Any = 1.0, step: Any = None, count: Any = None) -> Any:
        z = x[..., 0] + (1j * x[..., 1] if parts == 2 else 0)
        frames = np.lib.stride_tricks.sliding_window_view(z, length, axis=1)[:, ::hop]
        y = np.fft.fft(frames * w)
        y = y[..., : length // 2 + 1] if onesided else y
        return np.stack([y.real, y.imag], axis=-1)

    return drawn(
        f"STFT {length} {hop} onesided={onesided}",
        formula,
        arrays,
        since=17,
        needs_rank=True,
        oracle=oracle,  # onnxruntime 1.16 has no complex signals
        torch=in_torch,
    )


INT64 = 7

TORCH = {
    "ReduceSum": lambda x, a, k: x.sum(a, k),
    "ReduceMean": lambda x, a, k: x.mean(a, k),
    "ReduceMax": lambda x, a, k: x.amax(a, k),
    "ReduceMin": lambda x, a, k: x.amin(a, k),
    "ReduceL1": lambda x, a, k: x.abs().sum(a, k),
    "ReduceL2": lambda x, a, k: (x * x).sum(a, k).sqrt(),
    "ReduceSumSquare": lambda x, a, k: (x * x).sum(a, k),
    "ReduceLogSum": lambda x, a, k: x.sum(a, k).log(),
    "ReduceLogSumExp": lambda x, a, k: torch.logsumexp(x, a, k),
    "ReduceProd": lambda x, a, k: _product(x, a, k),
}


def _product(x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


@DRAWS.of(*TORCH)
def reduction(draw: Draw, operator: str) -> Case:
    """Axes as an attribute or an input, of constants or known at run time; or none: all of them."""
    shape = draw(shapes(high=4))
    rank, keep = len(shape), draw(st.integers(0, 1))
    x = numbers(draw, shape, 0.5 if operator == "ReduceLogSum" else -2.0)
    if operator == "ReduceProd" and x.size:
        flat = x.reshape(-1)
        for k in draw(st.lists(st.integers(0, x.size - 1), max_size=2)):
            flat[k] = 0.0
    sometimes = 13 if operator == "ReduceSum" else 18
    way = draw(st.sampled_from(["all", "constant", "run time", "none"]))
    axes = axes_of(draw, rank, smallest=1) if rank and way not in ("all", "none") else []
    if not axes and way != "none":
        way = "all"
    arrays, options = {"x": x}, {"keepdims": keep}
    if way == "run time":
        arrays["axes"] = np.array(axes, np.int64)

    def formula(op: Any, x: Any, axes: Any = axes) -> Any:
        if way == "none":
            return op(operator, x, op.constant([], INT64), noop_with_empty_axes=1, **options)
        if way == "run time":
            return op(operator, x, axes, **options)
        return op(operator, x, **({} if way == "all" else {"axes": axes}), **options)

    def in_torch(x: Any, **_: Any) -> Any:
        if x.ndim == 0 or way == "none":  # every element by itself
            return TORCH[operator](x[None], (0,), False)
        return TORCH[operator](x, tuple(axes or range(rank)), bool(keep))

    return drawn(
        f"{operator} {way} {axes} {options}",
        formula,
        arrays,
        since=sometimes if way in ("none", "run time") else 13,
        torch=in_torch,
        # onnxruntime 1.16 computes these in float32 inside.
        reference=operator in ("ReduceL1", "ReduceL2", "ReduceLogSum"),
    )


@DRAWS.of("Softmax", "LogSoftmax")
def softmax(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 4))
    axis, scale = axis_of(draw, len(shape)), draw(st.sampled_from([1, 10]))
    options = draw(st.sampled_from([{}, {"axis": axis}]))
    function = "softmax" if operator == "Softmax" else "log_softmax"
    return drawn(
        f"{operator} {options}",
        lambda op, x: op(operator, x, **options),
        {"x": scale * numbers(draw, shape)},
        torch=lambda x: getattr(torch, function)(x, options.get("axis", -1)),
    )


def running(x: Any, axis: int, exclusive: int, reverse: int, product: bool) -> Any:
    """Running sums or products in torch."""
    if reverse:
        x = x.flip(axis)
    if exclusive:
        first = torch.full_like(x.narrow(axis, 0, 1), 1.0 if product else 0.0)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    y = torch.cumprod(x, axis) if product else torch.cumsum(x, axis)
    return y.flip(axis) if reverse else y


@DRAWS.of("CumSum", "CumProd")
def cumulative(draw: Draw, operator: str) -> Case:
    shape = draw(shapes(1, 3, side=4))
    axis = axis_of(draw, len(shape))
    way = {"exclusive": draw(st.integers(0, 1)), "reverse": draw(st.integers(0, 1))}
    x = numbers(draw, shape)
    if operator == "CumProd":
        flat = x.reshape(-1)
        for k in draw(st.lists(st.integers(0, x.size - 1), max_size=3)):
            flat[k] = 0.0
    arrays = {"x": x}
    if draw(st.booleans()):
        arrays["axis"] = np.array(axis)
    return drawn(
        f"{operator} {axis} {way}",
        lambda op, x, axis=axis: op(
            operator, x, op.constant(axis) if isinstance(axis, int) else axis, **way
        ),
        arrays,
        since=13 if operator == "CumSum" else 26,
        torch=lambda x, **_: running(x, axis, **way, product=operator == "CumProd"),
    )
