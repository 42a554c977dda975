"""The sizes that the pages of a parquet file claim, read before a page is unpacked.

A page is unpacked as a whole into memory of the size in its header, which the footer does not have:
33 KB can hold a page of 1 GiB. Headers are structs in Thrift's compact protocol.

Source: https://github.com/apache/parquet-format, parquet.thrift (PageHeader);
https://github.com/apache/thrift, doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, BinaryIO

from ortflex_core import DataError

_LEAST, _TIMES = 2**28, 100
"""A page of every column together may take 256 MiB, or this multiple of the file."""
_STRUCT = 12
_UNPACKED, _PACKED = 2, 3
"""Numbers of fields in the header of a page."""
_DEEPEST = 8


def check(file: BinaryIO, label: str, group: Any, columns: Sequence[str]) -> None:
    """Refuse a row group whose pages are too large.

    Args:
        file: the file, whose position is changed.
        label: its name in errors.
        group: pyarrow's metadata of the row group.
        columns: the names of the columns that are read.

    Raises:
        DataError: the pages that are in memory together are larger than the bound, or a header is not
            valid.
    """
    most = max(_LEAST, _TIMES * file.seek(0, 2))
    together = 0
    for k in range(group.num_columns):
        chunk = group.column(k)
        if chunk.path_in_schema.partition(".")[0] not in columns:
            continue
        together += _largest(file, label, chunk)
        if together > most:
            raise DataError(
                f"{label}: pages of the column {chunk.path_in_schema!r} and of those before it take "
                f"{together} bytes of memory when they are unpacked, but {most} are allowed; write the "
                "file with smaller pages (data_page_size in pyarrow), or read fewer columns"
            )


def _largest(file: BinaryIO, label: str, chunk: Any) -> int:
    """The size of the largest unpacked page of a column chunk."""
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        place = min(place, chunk.dictionary_page_offset)
    end, largest = place + chunk.total_compressed_size, 0
    while place < end:
        file.seek(place)
        sizes: dict[int, int] = {}
        try:
            _struct(file, sizes, 0)
        except (EOFError, OverflowError):
            sizes = {}
        packed = sizes.get(_PACKED, -1)
        if packed < 0 or sizes.get(_UNPACKED, -1) < 0:
            raise DataError(
                f"{label}: the header of a page of the column {chunk.path_in_schema!r} is not valid"
            )
        largest, place = max(largest, sizes[_UNPACKED]), file.tell() + packed
    return largest


def _struct(file: BinaryIO, found: dict[int, int], depth: int) -> None:
    """Read a struct; ``found`` gets its integers by the numbers of their fields."""
    if depth > _DEEPEST:
        raise OverflowError
    number = 0
    while head := _byte(file):
        number = number + (head >> 4) if head >> 4 else _zigzag(file)
        value = _value(file, head & 15, depth)
        if value is not None:
            found[number] = value


def _value(file: BinaryIO, kind: int, depth: int) -> int | None:
    """Read a value of a type; the integer, or None for other types."""
    if kind in (1, 2):  # true and false are in the type
        return None
    if kind == 3:
        return _byte(file)
    if kind in (4, 5, 6):
        return _zigzag(file)
    if kind == 7:
        file.seek(8, 1)
    elif kind == 8:  # bytes, after their number
        file.seek(_unsigned(file), 1)
    elif kind == _STRUCT:
        _struct(file, {}, depth + 1)
    else:  # lists, sets and maps, which a header has not
        raise OverflowError
    return None


def _zigzag(file: BinaryIO) -> int:
    value = _unsigned(file)
    return (value >> 1) ^ -(value & 1)


def _unsigned(file: BinaryIO) -> int:
    """A number of 7 bits per byte, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        byte = _byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise OverflowError


def _byte(file: BinaryIO) -> int:
    byte = file.read(1)
    if not byte:
        raise EOFError
    return byte[0]
