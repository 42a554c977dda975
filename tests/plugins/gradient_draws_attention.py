"""Draws of Attention and of rotary position embedding; the oracles are onnx's reference and torch."""

from __future__ import annotations

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

DRAWS = Draws()


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
