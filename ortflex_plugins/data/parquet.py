"""The data source ``parquet``: a file or a folder of files, read row group by row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from ortflex_plugins.data._table_pieces import Reader, Table

# Rows that are decoded at a time.
_ROWS = 2**14


@attrs.frozen(kw_only=True)
class Parquet(Table):
    """Tables in parquet files of one schema; data may be larger than the memory.

    Columns of numbers are placed side by side in one input of shape [rows, columns]; a column of
    lists of one length, or of tensors, is a separate input with the column's name (or ``input`` if
    it is the only one). ``target`` as a name gives labels of shape [rows], as a list of names
    [rows, names], as a mapping several labels.

    Row groups are read in a random order, and rows are mixed within ``buffer``
    (:mod:`ortflex_core.data.shuffle_buffer`). Data that fit into the buffer are read once.

    Raises:
        DataError: no such file, no column of that name, files whose columns differ, missing values,
            lists of different lengths, types that are not numbers; pyarrow is not installed.

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

        with pyarrow.parquet.ParquetFile(file) as opened:
            metadata = opened.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            return opened.schema_arrow, sizes

    def read(self, file: Path, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """The schema, and the group's rows."""
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as opened:
            yield opened.schema_arrow
            if (
                group < opened.num_row_groups
            ):  # else it has fewer rows than before, which is reported
                yield from opened.iter_batches(
                    batch_size=_ROWS, row_groups=[group], columns=list(columns)
                )
