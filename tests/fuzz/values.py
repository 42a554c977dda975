"""Values that programs stumble over, and bytes that were shuffled about."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

TEXTS = (
    "",
    "\0",
    "a/b",
    "../../outside",
    "/dev/zero",
    "\x1b]0;title\x07\x1b[31m",
    "<script>alert(1)</script>",
    "\"'&<>`",
    "\u202etxt.exe",
    "\U0001f4a9" * 3,
    "n" * 65536,
    "*",
    "[!a",
    "batch",
    "label",
    "host/x",
    "com.microsoft",
    "FusedMatMul",
    "Loop",
    "Softmax",
)


def number(rng: Random, old: int, bits: int = 63) -> int:
    """A number near the old one, near a power of two, or none that makes sense."""
    what = rng.randrange(4)
    if what == 0:
        return max(-(2**bits), min(2**bits - 1, old + rng.choice((-2, -1, 1, 2, 7))))
    if what == 1:
        return rng.choice((0, 1, -1, 2, 3, 8, 16, 100))
    if what == 2:
        return rng.choice((-1, 1)) * (2 ** rng.randrange(bits) - rng.randrange(2))
    return rng.choice((2**bits - 1, -(2**bits), 2**31 - 1, 2**20, 2**28, 999))


def real(rng: Random) -> float:
    """A float, finite or not."""
    return rng.choice((0.0, -0.0, 1.0, -1.0, 0.5, 1e30, 1e-30, math.nan, math.inf, -math.inf))


def scrambled(rng: Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, cut out, put in, or moved."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 64, 1000))
        what = rng.randrange(6)
        if what == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif what == 1 and out:
            out[at % len(out)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif what == 2:
            del out[at : at + length]
        elif what == 3:
            out[at:at] = rng.randbytes(length)
        elif what == 4:
            start = rng.randrange(len(out) + 1)
            out[at:at] = out[start : start + length]
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def tree(rng: Random, value: Any) -> Any:
    """Numbers, texts, lists and tables with one place changed."""
    inner = len(value) if isinstance(value, dict | list) else 0
    if inner and rng.random() < 0.85:
        if isinstance(value, dict):
            key = rng.choice(list(value))
            what = rng.random()
            if what < 0.08:
                return {k: v for k, v in value.items() if k != key}
            if what < 0.16:
                return {**value, rng.choice((*TEXTS, *value)): value[key]}
            return {**value, key: tree(rng, value[key])}
        at = rng.randrange(inner)
        what = rng.random()
        if what < 0.1:
            return value[:at] + value[at + 1 :]
        if what < 0.2:
            return [*value, value[at]]
        return [*value[:at], tree(rng, value[at]), *value[at + 1 :]]
    return _other(rng, value)


def _other(rng: Random, value: Any) -> Any:
    choices: list[Any] = [number(rng, 3), real(rng), rng.choice(TEXTS), True, False, [], {}]
    if isinstance(value, str):
        choices += [value + "x", value[:-1], [value], {"name": value}, {value: value}]
    if isinstance(value, int) and not isinstance(value, bool):
        choices += [number(rng, value), value + 1, value - 1, str(value), 10 ** rng.randrange(400)]
    if isinstance(value, list | dict):
        choices += [[value, value], {"name": "adam", "x": value}, None]
    if isinstance(value, list):
        nested = value
        for _ in range(rng.choice((3, 50, 500))):
            nested = [nested]
        choices.append(nested)
    return rng.choice(choices)


def written(value: Any) -> str:
    """JSON, with NaN and lone surrogates as they come."""
    return json.dumps(value, ensure_ascii=True)
