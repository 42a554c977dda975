"""The data source ``arrow``: files in Arrow's IPC format (Feather), read record batch by record batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from ortflex_plugins.data._table_pieces import Reader, Table


@attrs.frozen(kw_only=True)
class Arrow(Table):
    """Tables in Arrow's file format, also called Feather; data may be larger than the memory.

    Columns, labels and shuffling are as with ``parquet``, with record batches as row groups. The
    streaming format has no random access and is refused.

    Raises:
        DataError: as for ``parquet``; a file in the streaming format.

    >>> import tempfile
    >>> import pyarrow.feather
    >>> table = pyarrow.table({"pixels": [[1.0, 2.0], [3.0, 4.0]], "y": ["cat", "dog"]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.feather.write_feather(table, f"{folder}/data.arrow")
    ...     columns = Arrow(path=f"{folder}/data.arrow").load()
    >>> columns.inputs["X"].tolist(), columns.labels["y"].tolist()
    ([[1.0, 2.0], [3.0, 4.0]], ['cat', 'dog'])

    Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format; pyarrow.ipc.open_file.
    """

    name: ClassVar[str] = "arrow"

    def reader(self) -> Reader:
        """The record batches of a file."""
        return _RecordBatches()


class _RecordBatches(Reader):
    ending = "arrow"

    def look(self, file: Path) -> tuple[Any, list[int]]:
        """Batches have to be opened for their lengths, but only their narrowest column is read."""
        import pyarrow

        with pyarrow.OSFile(str(file)) as raw:
            schema = pyarrow.ipc.open_file(raw).schema
            widths = [_width(kind) for kind in schema.types]
            field = widths.index(min(widths, default=0)) if widths else 0
            narrow = pyarrow.ipc.IpcReadOptions(included_fields=[field])
            opened = pyarrow.ipc.open_file(raw, options=narrow)
            sizes = [opened.get_batch(k).num_rows for k in range(opened.num_record_batches)]
            return schema, sizes

    def read(self, file: Path, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """The schema, and the batch."""
        import pyarrow

        # Not mapped, so that a file that is truncated while it is read is an error, not a crash.
        with pyarrow.OSFile(str(file)) as raw:
            schema = pyarrow.ipc.open_file(raw).schema
            yield schema
            fields = [schema.get_field_index(name) for name in columns]
            options = pyarrow.ipc.IpcReadOptions(included_fields=sorted(fields))
            opened = pyarrow.ipc.open_file(raw, options=options)
            if group < opened.num_record_batches:
                yield opened.get_batch(group)


def _width(kind: Any) -> int:
    """Bytes of a value; a large number if it has no fixed size."""
    try:
        return int(kind.byte_width)
    except ValueError:
        return 2**30
