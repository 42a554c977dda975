"""The data source ``parquet``: a file or a folder of files, which are read by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from ortflex_core import open_regular
from ortflex_plugins.data import _parquet_pages
from ortflex_plugins.data._table_pieces import Reader, Table

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

    def reader(self) -> Reader:
        """The row groups of a file."""
        return _RowGroups()


class _RowGroups(Reader):
    ending = "parquet"

    def look(self, file: Path) -> tuple[Any, list[int]]:
        """The schema and row groups, from the footer."""
        import pyarrow.parquet

        with open_regular(file) as raw, pyarrow.parquet.ParquetFile(raw) as opened:
            metadata = opened.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            return opened.schema_arrow, sizes

    def read(self, file: Path, group: int, columns: Sequence[str]) -> Iterator[Any]:
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
                _parquet_pages.check(raw, str(file), opened.metadata.row_group(group), columns)
                yield from opened.iter_batches(
                    batch_size=_batch_size(opened.metadata.row_group(group), columns),
                    row_groups=[group],
                    columns=list(columns),
                )


def _batch_size(group: Any, columns: Sequence[str]) -> int:
    """The rows that are decoded together, fewer if they have lists of many values."""
    chunks = [group.column(k) for k in range(group.num_columns)]
    read = [c for c in chunks if c.path_in_schema.partition(".")[0] in columns]
    values = sum(c.num_values for c in read) / max(1, group.num_rows)
    return max(1, min(_ROWS, int(_VALUES / max(1, values))))


def _is_string(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))
