"""The messages in the bytes of a model, counted before protobuf makes an object of each.

Two bytes of a file can be an empty message, which takes more than a hundred bytes in memory. The bytes
are walked with the fields of onnx's messages; the data of tensors are skipped.

Source: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
from onnx import ModelProto

from ortflex_core.kernel.errors import ModelError

SMALL = 2**20
"""The messages of a file of fewer bytes take little memory, and are not counted."""
MOST_PARTS = 5_000_000
"""The largest number of messages and strings."""
MOST_PROSE = 2**26
"""The largest number of bytes of documentation and metadata."""
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_PROSE = {"doc_string", "metadata_props"}


@attrs.frozen
class _Message:
    """What is known of a type of messages: its messages and strings, by the number of the field."""

    name: str
    inner: dict[int, _Message] = attrs.field(factory=dict, repr=False, eq=False)
    strings: set[int] = attrs.field(factory=set)
    prose: set[int] = attrs.field(factory=set)


class _Malformed(Exception):
    """These bytes are not a protocol buffer; what comes before them may still fill the memory."""


def check(content: bytes, label: str, most_nodes: int) -> None:
    """Refuse a model with more nodes, messages or documentation than ortflex reads.

    Raises:
        ModelError: says what there is too much of; or the bytes are not a protocol buffer.
    """
    if len(content) < SMALL:
        return
    counts: Counter[str] = Counter()
    pending = [(0, len(content), _TYPES[ModelProto.DESCRIPTOR.full_name])]
    try:
        while pending:
            start, end, message = pending.pop()
            _walk(content, start, end, message, pending, counts)
            if counts["nodes"] > most_nodes:
                raise ModelError(
                    f"{label} has more than {most_nodes} nodes; no more than that can be trained"
                )
            if counts["parts"] > MOST_PARTS:
                raise ModelError(
                    f"{label} ({len(content)} bytes) has more than {MOST_PARTS} entries (tensors, names, "
                    "attributes, …), which no model needs; export it again"
                )
            if counts["prose"] > MOST_PROSE:
                raise ModelError(
                    f"{label} has more than {MOST_PROSE} bytes of documentation (doc_string, "
                    "metadata_props), which is copied with the graph; clear it and save the model again"
                )
    except _Malformed:
        raise ModelError(
            f"{label} ({len(content)} bytes) is not an ONNX model or is truncated"
        ) from None


def _walk(
    content: bytes,
    start: int,
    end: int,
    message: _Message,
    pending: list[tuple[int, int, _Message]],
    counts: Counter[str],
) -> None:
    """Count the fields of one message, and note the messages in it."""
    at, parts, nodes = start, 0, 0
    inner, strings, prose = message.inner, message.strings, message.prose
    most = MOST_PARTS - counts["parts"]
    while at < end and parts <= most:
        tag, at = _number(content, at, end)
        field, wire = (tag & 0xFFFFFFFF) >> 3, tag & 7
        if wire == _BYTES:
            size, at = _number(content, at, end)
            if size > end - at:
                raise _Malformed
            if field in prose:
                counts["prose"] += size
            found = inner.get(field)
            if found is not None:
                parts += 1
                nodes += found.name == "NodeProto"
                if size:
                    pending.append((at, at + size, found))
            elif field in strings:
                parts += 1
            at += size
        elif wire == _VARINT:
            _, at = _number(content, at, end)
        elif wire in (_EIGHT, _FOUR):
            at += 8 if wire == _EIGHT else 4
        else:  # a group, which no field of onnx is, or no protocol buffer
            raise _Malformed
    if at > end:
        raise _Malformed
    counts["parts"] += parts
    counts["nodes"] += nodes


def _number(content: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of variable length, and the place after it."""
    value = shift = 0
    while at < end and shift < 70:
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _Malformed


def _types() -> dict[str, _Message]:
    """The types of messages that a model may have, by their full names."""
    found: dict[str, _Message] = {}

    def add(descriptor: Any) -> _Message:
        if descriptor.full_name in found:
            return found[descriptor.full_name]
        made = found[descriptor.full_name] = _Message(descriptor.name)
        for field in descriptor.fields:
            if field.type == field.TYPE_MESSAGE:
                made.inner[field.number] = add(field.message_type)
            elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
                made.strings.add(field.number)
            if field.name in _PROSE:
                made.prose.add(field.number)
        return made

    add(ModelProto.DESCRIPTOR)
    return found


_TYPES = _types()
