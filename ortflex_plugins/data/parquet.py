"""The data source ``parquet``: a file or a folder of files, which are read by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import attrs

from ortflex_core import DataError, open_regular
from ortflex_plugins.data._table_pieces import Table

# The number of rows that are decoded together, and of their values: equal ones take no bytes in a file.
_ROWS, _VALUES = 2**14, 2**24


@attrs.frozen(kw_only=True)
class Parquet(Table):
    """Tables in Parquet files with the same schema. The data can be larger than memory.

    Columns of numbers are combined into one input of shape [rows, columns]. Each column of tensors, or
    of lists of equal length, becomes a separate input with the name of the column. If there is only one
    feature column, the parameter ``input`` sets the name of its input. If ``target`` is a name, the
    labels have the shape [rows]. If it is a list of names, they have the shape [rows, names]. If it is
    a mapping, each key is the name of a label and each value is its column.

    Row groups are read in random order, and their rows are shuffled in a buffer of ``buffer`` rows.
    Data that fits into the buffer is read only once.

    Raises:
        DataError: the file or a column does not exist, the columns of files differ, a value is missing,
            lists have different lengths, values are not numbers, pages are too large when they are unpacked
            (more than 256 MiB and than 100 times the file), or pyarrow is not installed.

    >>> import tempfile
    >>> import pyarrow.parquet
    >>> table = pyarrow.table({"a": [1.0, 2.0], "b": [3.0, 4.0], "y": [0, 1]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.parquet.write_table(table, f"{folder}/data.parquet")
    ...     columns = Parquet(path=f"{folder}/data.parquet").load()
    >>> columns.inputs["X"].tolist(), columns.labels["y"].tolist()
    ([[1.0, 3.0], [2.0, 4.0]], [0, 1])

    Source: https://parquet.apache.org/docs/file-format/; pyarrow.parquet.ParquetFile.
    """

    name: ClassVar[str] = "parquet"
    ending: ClassVar[str] = "parquet"

    def look(self, file: Path) -> tuple[Any, list[int]]:
        """The schema and row groups, from the footer."""
        import pyarrow.parquet

        with open_regular(file) as raw, pyarrow.parquet.ParquetFile(raw) as opened:
            metadata = opened.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            return opened.schema_arrow, sizes

    def batches(self, file: Path, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """The schema, and the group's rows."""
        import pyarrow.parquet

        with open_regular(file) as raw:
            with pyarrow.parquet.ParquetFile(raw) as opened:
                schema = opened.schema_arrow
            yield schema
            # Each different string once: a long one in many rows takes few bytes in a file.
            strings = [n for n in columns if _is_string(schema.field(n).type)]
            raw.seek(0)
            with pyarrow.parquet.ParquetFile(raw, read_dictionary=strings) as opened:
                if group >= opened.num_row_groups:
                    return  # it has fewer rows than before, which is reported
                _check_pages(raw, str(file), opened.metadata.row_group(group), columns)
                yield from opened.iter_batches(
                    batch_size=_batch_size(opened.metadata.row_group(group), columns),
                    row_groups=[group],
                    columns=list(columns),
                )


# A page is unpacked as a whole into memory of the size in its header, which the footer does not have: 33 KB
# can hold a page of 1 GiB. Headers are structs in Thrift's compact protocol:
# https://github.com/apache/parquet-format, parquet.thrift (PageHeader);
# https://github.com/apache/thrift, doc/specs/thrift-compact-protocol.md.
_LEAST, _TIMES = 2**28, 100
"""A page of every column together may take 256 MiB, or this multiple of the file."""
_STRUCT = 12
_UNPACKED, _PACKED = 2, 3
"""Numbers of fields in the header of a page."""
_DEEPEST = 8


def _check_pages(file: BinaryIO, label: str, group: Any, columns: Sequence[str]) -> None:
    """Refuse a row group whose pages are too large; the position in the file is changed."""
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


def _batch_size(group: Any, columns: Sequence[str]) -> int:
    """The rows that are decoded together, fewer if they have lists of many values."""
    chunks = [group.column(k) for k in range(group.num_columns)]
    read = [c for c in chunks if c.path_in_schema.partition(".")[0] in columns]
    values = sum(c.num_values for c in read) / max(1, group.num_rows)
    return max(1, min(_ROWS, int(_VALUES / max(1, values))))


def _is_string(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))
