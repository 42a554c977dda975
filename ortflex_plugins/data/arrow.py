"""The data source ``arrow``: files in Arrow's IPC format (Feather), which are read by record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from ortflex_core import open_regular
from ortflex_plugins.data._table_pieces import Table


@attrs.frozen(kw_only=True)
class Arrow(Table):
    """Tables in the Arrow file format, also called Feather. The data can be larger than memory.

    Columns, labels and shuffling work as in ``parquet``, with record batches instead of row groups.
    The Arrow streaming format is not supported, because it does not allow random access.

    Raises:
        DataError: as for ``parquet``, or the file has the streaming format.

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
    ending: ClassVar[str] = "arrow"

    def look(self, file: Path) -> tuple[Any, list[int]]:
        """The schema and the lengths of the batches; only the narrowest column is read for them."""
        import pyarrow

        with open_regular(file) as raw:
            schema = pyarrow.ipc.open_file(raw).schema
            widths = [_width(kind) for kind in schema.types]
            field = widths.index(min(widths, default=0)) if widths else 0
            narrow = pyarrow.ipc.IpcReadOptions(included_fields=[field])
            opened = pyarrow.ipc.open_file(raw, options=narrow)
            sizes = [opened.get_batch(k).num_rows for k in range(opened.num_record_batches)]
            return schema, sizes

    def batches(self, file: Path, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """The schema, and the batch."""
        import pyarrow

        # The file is not mapped, because a file that becomes shorter must not end the process.
        with open_regular(file) as raw:
            schema = pyarrow.ipc.open_file(raw).schema
            yield schema
            fields = [schema.get_field_index(name) for name in columns]
            options = pyarrow.ipc.IpcReadOptions(included_fields=sorted(fields))
            opened = pyarrow.ipc.open_file(raw, options=options)
            if group < opened.num_record_batches:
                yield opened.get_batch(group)


def _width(kind: Any) -> int:
    """The bytes of a value; a large number if values have no fixed size."""
    try:
        return int(kind.byte_width)
    except ValueError:
        return 2**30
