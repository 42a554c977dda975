"""The data source ``parquet``: a file or a folder of files, which are read by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from ortflex_core import open_regular
from ortflex_plugins.data._table_pieces import Reader, Table

# The number of rows that are decoded together.
_ROWS = 2**14


@attrs.frozen(kw_only=True)
class Parquet(Table):
    """Tables in parquet files of one schema; data may be larger than the memory.

    Columns of numbers are placed side by side in one input of shape [rows, columns]. A column of tensors,
    or of lists with one length, is a separate input with the name of the column, or ``input`` if it is
    the only one. If ``target`` is a name, labels have the shape [rows]; if it is a list of names,
    [rows, names]; if it is a mapping, there are several labels.

    Row groups are read in a random order, and rows are shuffled within ``buffer``
    (:mod:`ortflex_core.training.data.shuffle_buffer`). Data that fit into the buffer are read once.

    Raises:
        DataError: the file or a column does not exist, the columns of files differ, a value is missing,
            lists have different lengths, values are not numbers, or pyarrow is not installed.

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

        with open_regular(file) as raw, pyarrow.parquet.ParquetFile(raw) as opened:
            yield opened.schema_arrow
            if (
                group < opened.num_row_groups
            ):  # else it has fewer rows than before, which is reported
                yield from opened.iter_batches(
                    batch_size=_ROWS, row_groups=[group], columns=list(columns)
                )
