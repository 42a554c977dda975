"""Values that programs stumble over, bytes that were shuffled about, and mutated protocol buffers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from random import Random
from typing import Any

from google.protobuf.message import Message

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


# Protocol buffers that stay such: fields, not bytes -----------------------------------------------


_WEIGHTS = {"AttributeProto": 8, "Dimension": 6, "NodeProto": 4, "TensorProto": 6}
"""What follows the first checks; everything else has 1."""


def mutate(rng: Random, message: Message) -> None:
    """Change some fields of a message, in place."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        places = list(_messages(message))
        # Small messages are many: every kind of message has its turn.
        kinds = sorted({type(place).__name__ for place in places})
        kind = rng.choices(kinds, [_WEIGHTS.get(name, 1) for name in kinds])[0]
        _change(rng, rng.choice([p for p in places if type(p).__name__ == kind]), places)


def _messages(message: Message) -> Iterator[Message]:
    pending = [message]
    while pending:
        here = pending.pop()
        yield here
        for field, value in here.ListFields():
            if field.message_type is not None:
                pending.extend(value if field.is_repeated else [value])


def _change(rng: Random, message: Any, places: list[Message]) -> None:
    fields = list(message.DESCRIPTOR.fields)
    there = [field for field, _ in message.ListFields()]
    # Mostly what is in the file; now and then a field that is not.
    field = rng.choice(there if there and rng.random() < 0.8 else fields)
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated:
        _change_list(rng, message, field, places)
    elif field.message_type is not None:
        same = [p for p in places if p.DESCRIPTOR is field.message_type and p is not message]
        if same:
            _put(getattr(message, field.name), rng.choice(same))
        else:
            getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _scalar(rng, field, getattr(message, field.name), places))


def _change_list(rng: Random, message: Any, field: Any, places: list[Message]) -> None:
    values = getattr(message, field.name)
    what = rng.randrange(5)
    if field.message_type is not None:
        same = [p for p in places if p.DESCRIPTOR is field.message_type]
        if what == 0 and len(values):
            del values[rng.randrange(len(values))]
        elif what == 1 and len(values) > 1:
            one, other = rng.sample(range(len(values)), 2)
            kept = type(values[one])()
            kept.CopyFrom(values[one])
            values[one].CopyFrom(values[other])
            values[other].CopyFrom(kept)
        elif what == 2 and len(values) and len(same) > 1:
            _put(rng.choice(values), rng.choice(same))
        elif same and len(values) < 200:
            _put(values.add(), rng.choice(same))
        else:
            values.add()
    elif what == 0 and len(values):
        del values[rng.randrange(len(values))]
    elif what == 1 and len(values):
        values.append(rng.choice(list(values)))
    elif what == 2 and len(values):
        at = rng.randrange(len(values))
        values[at] = _scalar(rng, field, values[at], places)
    else:
        values.append(_scalar(rng, field, values[0] if len(values) else None, places))


def _put(target: Any, source: Any) -> None:
    copy = type(source)()
    copy.CopyFrom(source)  # it may be inside of what it replaces
    if copy.ByteSize() < 100_000:
        target.CopyFrom(copy)


def _scalar(rng: Random, field: Any, old: Any, places: list[Message]) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING and field.type == field.TYPE_STRING:
        return _text(rng, places)
    if field.cpp_type == field.CPPTYPE_STRING:
        return scrambled(rng, old or b"") if rng.random() < 0.8 else b""
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return real(rng)
    if field.cpp_type == field.CPPTYPE_ENUM:
        known = [value.number for value in field.enum_type.values]
        return rng.choice(known)
    bits = 31 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 63
    value = number(rng, int(old or 0), bits)
    unsigned = field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)
    return abs(value) if unsigned else value


def _text(rng: Random, places: list[Message]) -> str:
    if rng.random() < 0.3:
        return rng.choice(TEXTS)
    found = [
        text
        for place in rng.sample(places, min(len(places), 20))
        for field, value in place.ListFields()
        if field.type == field.TYPE_STRING
        for text in (value if field.is_repeated else [value])
    ]
    return rng.choice(found or TEXTS)
