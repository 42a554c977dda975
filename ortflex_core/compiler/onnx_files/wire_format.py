"""The messages in the bytes of a model, counted before protobuf makes an object of each.

Two bytes of a file can be an empty message, which takes more than a hundred bytes in memory. The bytes
are walked with the fields of onnx's messages; the data of tensors are skipped.

Source: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, TensorProto

from ortflex_core.kernel.errors import ModelError

SMALL = 2**20
"""The messages of a file of fewer bytes take little memory, and are not counted."""
MOST_PARTS = 5_000_000
"""The largest number of messages and strings."""
MOST_PROSE = 2**26
"""The largest number of bytes of documentation and metadata."""
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_PROSE = {"doc_string", "metadata_props"}
_GRAPH, _INITIALIZER, _RAW = (
    message.DESCRIPTOR.fields_by_name[name].number
    for message, name in (
        (ModelProto, "graph"),
        (GraphProto, "initializer"),
        (TensorProto, "raw_data"),
    )
)
"""The numbers of fields."""
_DATA = {"data_location", "external_data", "segment"} | {
    f"{kind}_data" for kind in ("float", "int32", "string", "int64", "double", "uint64")
}
"""Fields with which a tensor is not only raw data."""


_FOREIGN = (
    (
        0,
        b"version https://git-lfs",
        "a pointer of Git LFS; `git lfs pull` downloads the file itself",
    ),
    (0, b"<", "a web page or XML; download the file itself"),
    (0, b"PK\x03\x04", "a zip archive, as torch, Keras and numpy write them"),
    (0, b"\x89HDF", "an HDF5 file, as Keras writes it; tf2onnx converts models of Keras"),
    (0, b"\x1f\x8b", "compressed by gzip; unpack it"),
    (0, b"\x80", "a pickle, as torch and joblib write them; export the model to ONNX"),
    (0, b"\x93NUMPY", "an array of numpy"),
    (4, b"ORTM", "in the ORT format of onnxruntime; pass the .onnx file from which it was made"),
    (4, b"TFL3", "a model of TensorFlow Lite; tf2onnx converts it"),
)
"""The first bytes of other files, from a position on, and what such a file is."""


def no_model(content: bytes) -> str:
    """The end of a message about bytes that are no ONNX model: what they are, as far as one can see.

    >>> no_model(b"<html>404</html>")
    'it is a web page or XML; download the file itself'
    """
    for place, mark, what in _FOREIGN:
        if content[place:].startswith(mark):
            return f"it is {what}"
    return ""


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
    """Refuse what is no protocol buffer or has too many nodes, messages or bytes of documentation."""
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
        kind = no_model(content[:64])
        tail = f": {kind}" if kind else ""
        raise ModelError(
            f"{label} ({len(content)} bytes) is not an ONNX model or is truncated{tail}"
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


def split(
    content: bytes | mmap.mmap, least: int
) -> tuple[bytes, list[tuple[TensorProto, int, int]]]:
    """A model without the raw data of the large initializers of its graph.

    Args:
        content: the bytes of a model.
        least: the smallest number of bytes of the data that are left out.

    Returns:
        the bytes of the model, whose tensors without data say that they are in another file; and of
        each such tensor the message, and the place and the length of its data. All bytes and no tensor,
        if the model has a form that onnx does not write.
    """
    try:
        parts, found = _without_data(content, least)
    except (_Malformed, DecodeError):  # protobuf finds the reason
        return bytes(content[:]), []
    return b"".join(parts), found


def _without_data(
    content: bytes | mmap.mmap, least: int
) -> tuple[list[bytes], list[tuple[TensorProto, int, int]]]:
    found: list[tuple[TensorProto, int, int]] = []
    graphs = 0
    out: list[bytes] = []
    for field, begin, start, end in _fields(content, 0, len(content)):
        if field != _GRAPH:
            out.append(bytes(content[begin:end]))
            continue
        graphs += 1
        if graphs > 1:  # they would be merged
            raise _Malformed
        inner: list[bytes] = []
        for part, part_begin, part_start, part_end in _fields(content, start, end):
            kept = None
            if part == _INITIALIZER and part_end - part_start > least:
                kept = _tensor(content, part_start, part_end, least)
            if kept is None:
                inner.append(bytes(content[part_begin:part_end]))
                continue
            found.append(kept)
            bare = kept[0].SerializeToString()
            inner += (_tag(_INITIALIZER), _varint(len(bare)), bare)
        out += (_tag(_GRAPH), _varint(sum(map(len, inner))), *inner)
    return out, found


def _tensor(
    content: bytes | mmap.mmap, start: int, end: int, least: int
) -> tuple[TensorProto, int, int] | None:
    """A tensor without its raw data, and their place and length; None if it has other data, too."""
    parts, places = [], []
    for field, begin, value, after in _fields(content, start, end):
        if field == _RAW:
            places.append((value, after - value))
        else:
            parts.append(bytes(content[begin:after]))
    if len(places) != 1 or places[0][1] < least:
        return None
    tensor = TensorProto.FromString(b"".join(parts))
    if {field.name for field, _ in tensor.ListFields()} & _DATA:
        return None
    tensor.data_location = TensorProto.EXTERNAL
    return tensor, *places[0]


def _fields(
    content: bytes | mmap.mmap, start: int, end: int
) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, first byte, first byte of the value, and the byte after it."""
    at = start
    while at < end:
        begin = at
        tag, at = _number(content, at, end)
        field, wire = (tag & 0xFFFFFFFF) >> 3, tag & 7
        value = at
        if wire == _BYTES:
            size, value = _number(content, at, end)
            at = value + size
        elif wire == _VARINT:
            _, at = _number(content, at, end)
        elif wire in (_EIGHT, _FOUR):
            at += 8 if wire == _EIGHT else 4
        else:
            raise _Malformed
        if at > end:
            raise _Malformed
        yield field, begin, value, at


def _tag(field: int) -> bytes:
    return _varint(field << 3 | _BYTES)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(content: bytes | mmap.mmap, at: int, end: int) -> tuple[int, int]:
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
