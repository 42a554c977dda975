"""Cases of Attention and RotaryEmbedding; the oracle is onnx's reference in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.ops.op_rotary_embedding import rotary_embedding

from ortflex_core import Array
from tests.gradcheck import data
from tests.plugins.gradient_cases import Case, case


def attention(name: str, mask: Any = None, heads: int = 2, shared: int = 1, **options: Any) -> Case:
    """``heads`` heads on 2 queries and 3 keys; ``shared`` of them use the same keys and values."""
    few = heads // shared
    flat = "q_num_heads" in options
    shapes = [(2, few * 2), (3, few * 2), (3, few * 3)] if flat else []
    if flat:
        q, k, v = data(1, 2, heads * 2), data(1, *shapes[1], seed=1), data(1, *shapes[2], seed=2)
    else:
        q, k = data(1, heads, 2, 2), data(1, few, 3, 2, seed=1)
        v = data(1, few, 3, 3, seed=2)
    given = {"q": q, "k": k, "v": v}
    if mask is not None:
        given["mask"] = mask

    def formula(op: Any, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return op.Attention(q, k, v, mask, **options)

    fields = {"since": 23, "sized": ("q", "k", "v", "mask"), "reference": True}
    return case(f"Attention-{name}", formula, **fields, **given)


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
        **{"since": 23, "sized": ("q", "k", "v"), "oracle": oracle, "dtypes": (np.float32,)},
    )


def past(op: Any, q: Any, k: Any, v: Any, past_k: Any, past_v: Any) -> Any:
    y, keys, values = op.Attention(q, k, v, None, past_k, past_v, outputs=3)
    return op.MatMul(y, op.MatMul(op.Transpose(keys, perm=[0, 1, 3, 2]), values))


def rotary(name: str, x: Any, **options: Any) -> Case:
    turned = (options.get("rotary_embedding_dim") or 4) // 2
    learned = options.pop("learned", False)
    at = options.pop("at", None)
    rows = (5, turned) if at is not None else (1, 3, turned)
    cos, sin = data(*rows, seed=1), data(*rows, seed=2)

    def formula(op: Any, x: Any, cos: Any = cos, sin: Any = sin, at: Any = None) -> Any:
        caches = [
            op.constant(c.astype("f4"), x.dtype) if isinstance(c, np.ndarray) else c
            for c in (cos, sin)
        ]
        return op.RotaryEmbedding(x, *caches, at, **options)

    def oracle(x: Array, cos: Array = cos, sin: Array = sin, at: Array | None = None) -> Array:
        found: Array = rotary_embedding(x, cos, sin, at, **options)
        return found

    given = {"x": x, **({"cos": cos, "sin": sin} if learned else {})}
    if at is not None:
        given["at"] = np.array(at)
    fields = {"since": 23, "sized": ("x",), "oracle": oracle, "dtypes": (np.float32,)}
    return case(f"Rotary-{name}", formula, **fields, **given)


_row = np.array([[True, False, True], [True, True, False]])
_nothing = np.array([[False, False, False], [True, True, False]])
_not_first = np.array([[False, True, True], [True, True, False]])
_flat = {"q_num_heads": 2, "kv_num_heads": 2}

CASES = [
    attention("plain"),
    attention("scale-softcap", scale=0.7, softcap=1.5),
    attention("causal", is_causal=1),
    attention("boolean", _row),
    attention("added", data(1, 1, 2, 3, seed=3)),
    blind("boolean", _nothing, _nothing),
    blind("infinite", np.where(_nothing, 0.0, -np.inf), _nothing),
    blind("lowest", np.where(_nothing, 0.0, np.finfo(np.float32).min), _nothing),
    blind("causal", _not_first, _nothing, is_causal=1),
    attention("three-dimensions", **_flat),
    attention("shared", heads=4, shared=2),
    attention("shared-3d", heads=4, shared=2, q_num_heads=4, kv_num_heads=2, is_causal=1),
    case(
        "Attention-past",
        past,
        **{"q": data(1, 1, 2, 2), "k": data(1, 1, 1, 2, seed=1), "v": data(1, 1, 1, 2, seed=2)},
        **{"past_k": data(1, 1, 2, 2, seed=3), "past_v": data(1, 1, 2, 2, seed=4)},
        **{"since": 23, "sized": ("q", "k", "v", "past_k", "past_v"), "reference": True},
    ),
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
    rotary("halves", data(1, 2, 3, 4)),
    rotary("pairs", data(1, 2, 3, 4), interleaved=1),
    rotary("learned", data(1, 2, 3, 4), learned=True),
    rotary("learned-pairs-places", data(1, 2, 3, 4), learned=True, interleaved=1, at=[[4, 0, 2]]),
    rotary("learned-3d-part", data(1, 3, 12), learned=True, num_heads=2, rotary_embedding_dim=4),
]
