"""Tables in pieces: parquet and arrow, their columns, types, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ortflex_core import DataError
from tests.plugins.test_data_pieces import Write, pyarrow, write_table
from tests.training import plugins

pytestmark = pytest.mark.once


@pytest.fixture(params=["parquet", "arrow"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Write:
    """Open tables that were written to files of their own: ``tables(first, second, **parameters)``."""
    pyarrow()

    def opened(*content: Any, rows: int = 9, **parameters: Any) -> Any:
        (tmp_path / "tables").mkdir(exist_ok=True)
        for k, table in enumerate(content):
            write_table(tmp_path / "tables" / f"{k}.{request.param}", table, rows)
        spec = {"name": request.param, "path": str(tmp_path / "tables"), **parameters}
        return plugins().component("data", spec).load()

    return opened


def test_which_column_is_what(tables: Write) -> None:
    pa = pyarrow()
    table = pa.table(
        {
            "id": ["p", "q"],
            "age": pa.array([1, 2], pa.int64()),
            "size": pa.array([0.5, 0.25], pa.float64()),
            "image": pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.int16()))),
            "fixed": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.float32(), 3)),
            "w": [0.5, 2.0],
            "kind": pa.array(["cat", "dog"]).dictionary_encode(),
            "y": [True, False],
        }
    )
    columns = tables(table, columns=["size", "age", "image", "fixed"], weight="w", target="kind")
    assert columns.inputs["X"].tolist() == [[0.5, 1.0], [0.25, 2.0]]
    assert columns.inputs["image"].shape == (2, 2, 2)
    assert columns.inputs["image"].dtype == np.int16
    assert columns.inputs["fixed"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert columns.weights["sample_weight"].tolist() == [0.5, 2.0]
    assert columns.labels["y"].tolist() == ["cat", "dog"]
    inputs = {"left": ["age"], "right": "fixed"}
    columns = tables(table, columns=inputs, target={"label/a": "y", "label/b": "kind"})
    assert columns.inputs["left"].tolist() == [[1], [2]]
    assert columns.inputs["right"].dtype == np.float32
    assert columns.labels["label/a"].tolist() == [True, False]
    alone = tables(table.select(["fixed", "y"]))
    assert list(alone.inputs) == ["X"]
    matrix = tables(table.select(["size", "age", "y"]), target=["y", "age"], input="features")
    assert matrix.labels["y"].tolist() == [[1, 1], [0, 2]]
    assert list(matrix.inputs) == ["features"]


def test_tensors_of_a_fixed_shape(tables: Write) -> None:
    pa = pyarrow()
    images = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(images)
    columns = tables(pa.table({"pixels": tensors, "y": [0, 1, 0, 1]}), rows=3)
    assert_array_equal(columns.inputs["X"], images)


@pytest.mark.parametrize(
    ("first", "second", "options", "text"),
    [
        ({}, {}, {"target": "z"}, "0.{}: no column 'z'; Known: a, b, y"),
        ({}, {}, {"columns": ["a", "bb"]}, "0.{}: no column 'bb'; did you mean 'b'?"),
        ({}, {}, {"weight": "w"}, "0.{}: no column 'w'"),
        ({}, {"b": None}, {}, "1.{}: no column 'b', which"),
        ({}, {"a": [1.0, 2.0]}, {}, "1.{}: the column 'a' is double, in"),
        ({"a": ["p", "q"]}, {}, {}, "0.{}: the column 'a' is string, which cannot be joined with"),
        ({}, {}, {"columns": ["a"], "target": ["c"]}, "0.{}: no column 'c'"),
        ({"b": [1, None]}, {"b": [1, 2]}, {}, "column 'b': row 1 has no value; fill ="),
        ({"b": [[1], [1, 2]]}, {"b": [[1], [1]]}, {}, "the list of row 1 has 2 values, that of"),
    ],
)
def test_tables_that_do_not_fit(
    first: Any, second: Any, options: Any, text: str, tables: Write, request: Any
) -> None:
    pa = pyarrow()

    def table(changes: Any) -> Any:
        content = {"a": pa.array([1, 2], pa.int32()), "b": [3, 4], "y": [0, 1]} | changes
        return pa.table({k: v for k, v in content.items() if v is not None})

    kind = request.node.callspec.params["tables"]
    with pytest.raises(DataError, match=re.escape(text.format(kind))):
        tables(table(first), table(second), **options)


def test_types_that_are_no_numbers_and_empty_tables(tables: Write) -> None:
    pa = pyarrow()
    import datetime

    day = pa.array([datetime.date(2020, 1, 1)])
    with pytest.raises(DataError, match="the column 'day' is date32"):
        tables(pa.table({"day": day, "y": [1]}))
    with pytest.raises(DataError, match="column 'day': values of type date32"):
        tables(pa.table({"a": [1], "day": day}), target="day")
    with pytest.raises(DataError, match="no column is left for the features; all are labels or"):
        tables(pa.table({"y": [1]}))
    with pytest.raises(DataError, match="the data are empty: 0 rows"):
        tables(pa.table({"a": pa.array([], pa.int32()), "y": pa.array([], pa.int32())}))


def test_files_that_are_none(tables: Write, tmp_path: Path, request: Any) -> None:
    kind = request.node.callspec.params["tables"]
    (tmp_path / "tables").mkdir()
    with pytest.raises(DataError, match=rf"expected \.{kind} files in this folder, found none"):
        tables()
    (tmp_path / "tables" / f"0.{kind}").write_bytes(b"PAR1 or ARROW1, but no more than that")
    with pytest.raises(DataError, match=rf"0\.{kind}: cannot be read: "):
        tables()


@pytest.mark.parametrize("stored", [True, False])
def test_a_string_that_is_repeated_is_not_written_out_without_an_end(
    tmp_path: Path, stored: bool
) -> None:
    """A file of 1 KB whose rows are 80 GB: the dictionary has the string once."""
    pa = pyarrow()
    from pyarrow import parquet

    path = tmp_path / "bomb.parquet"
    strings = pa.array(["x" * 20_000_000])
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4000, np.int32)), strings)
    table = pa.table({"a": np.zeros(4000, np.float32), "y": column})
    parquet.write_table(table, path, compression="zstd", store_schema=stored)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"bomb\.parquet.* 'y': a string has 20000000"):
        plugins().component("data", {"name": "parquet", "path": str(path)}).load()


def test_rows_with_many_equal_values_are_decoded_in_parts(tmp_path: Path) -> None:
    """A file of some KB whose 16,384 rows have 16,000 values each: no more than 2²⁴ at once."""
    pa = pyarrow()
    from pyarrow import parquet

    path = tmp_path / "wide.parquet"
    values = pa.array(np.zeros(2000 * 16_000, np.float32))
    wide = pa.FixedSizeListArray.from_arrays(values, 16_000)
    table = pa.table({"a": wide, "y": np.zeros(2000, np.float32)})
    parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 100_000
    source = plugins().component("data", {"name": "parquet", "path": str(path), "buffer": 64})
    pieces = source.load()
    sizes = [part.rows for part in pieces.read(0)]
    assert sum(sizes) == 2000
    assert max(sizes) * 16_000 <= 2**24


def test_the_claimed_sizes_of_pages_are_bounded(tmp_path: Path) -> None:
    """Three pages of 2 MiB that claim 128 MiB each: the header has the size, the footer has not."""
    pa = pyarrow()
    from pyarrow import parquet

    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2**19, np.float32)), 2**18)
    table = pa.table({"a": wide, "b": wide, "c": wide, "y": np.zeros(2, np.float32)})
    path = tmp_path / "pages.parquet"
    options: dict[str, Any] = {"compression": "zstd", "data_page_size": 2**30}
    parquet.write_table(table, path, use_dictionary=False, **options)

    def load(**parameters: Any) -> Any:
        return plugins().component("data", {"name": "parquet", "path": str(path), **parameters})

    assert load().load().inputs["a"].shape == (2, 2**18)
    group = parquet.ParquetFile(path).metadata.row_group(0)
    starts = [group.column(k).data_page_offset for k in range(3)]
    content = bytearray(path.read_bytes())
    for start in starts:  # a type, then the size as a number of four bytes
        assert content[start] == content[start + 2] == 0x15
        content[start + 3 : start + 7] = b"\xfe\xff\xff\x7f"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"pages\.parquet.*'c\..*402653181"):
        load().load()
    content[starts[0]] = 0x1B  # a map, which no header has
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"pages\.parquet.*header of a page of the column 'a"):
        load().load()
