"""npy shards, parquet and arrow: rows and columns that come out, and what is said of broken files."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.testing import assert_array_equal

from ortflex_core import (
    Columns,
    ConfigError,
    DataError,
    DataSourceKit,
    Pieces,
    Recipe,
    Trainer,
)
from ortflex_core import compare as compare_backends
from ortflex_core.training.data.pieces import concat_columns, head, rows_of
from ortflex_plugins.data.npy import NpyFolder
from tests import models
from tests.training import SaveAt, make, plugins, regression, same

pytestmark = pytest.mark.once

X, Y = regression(rows=100, features=6)
KINDS = ("npy", "parquet", "arrow")
Write = Callable[..., Any]


def pyarrow() -> Any:
    """pyarrow with its module for parquet."""
    pytest.importorskip("pyarrow.parquet", exc_type=ImportError)
    return pytest.importorskip("pyarrow", exc_type=ImportError)


def table_of(x: Any, y: Any) -> Any:
    columns = {f"c{k}": x[:, k] for k in range(x.shape[1])}
    return pyarrow().table({**columns, "y": y.ravel()})


def write_table(path: Path, table: Any, rows: int = 9) -> None:
    pa = pyarrow()
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=rows)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Write:
    """Write arrays as two files of a kind; returns the source: ``store(x, y, **parameters)``."""

    def save(x: Any = X, y: Any = Y, **parameters: Any) -> Any:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for name, part in (("a", slice(0, 40)), ("b", slice(40, None))):
            if request.param == "npy":
                (folder / name).mkdir(exist_ok=True)
                np.save(folder / name / "X.npy", x[part])
                np.save(folder / name / "y.npy", y[part])
            else:
                table = table_of(x[part], y[part])
                write_table(folder / f"{name}.{request.param}", table)
        if request.param != "npy":
            parameters = {"target": "y" if y.ndim == 1 else ["y"]} | parameters
        spec = {"name": request.param, "path": str(folder), **parameters}
        return plugins().component("data", spec)

    return save


def read(pieces: Pieces) -> Columns:
    return concat_columns([c for k in range(len(pieces.sizes)) for c in pieces.read(k)])


def test_rows_are_pieces_unless_they_fit_into_the_buffer(store: Write) -> None:
    pieces = store(buffer=30).load()
    assert isinstance(pieces, Pieces)
    assert (rows_of(pieces), pieces.buffer) == (100, 30)
    assert read(pieces).inputs["X"].dtype == np.float32
    columns = store().load()
    assert isinstance(columns, Columns)
    options: Any = {"epochs": 2, "batch_size": 7, "learning_rate": 0.05}
    one, other = make(models.mlp(), **options), make(models.mlp(), **options)
    wanted = other.fit(X, Y, validation_data=0.2).losses
    assert one.fit(columns, validation_data=0.2).losses == wanted


def test_training_evaluation_and_prediction_on_pieces(store: Write) -> None:
    source = store(buffer=30)
    options: Any = {"epochs": 3, "batch_size": 7, "learning_rate": 0.05, "metrics": ["mae"]}
    trainer = make(models.mlp(), **options)
    history = trainer.fit(source, validation_data=source)
    assert history["rows"] == [100.0] * 3
    wanted = trainer.evaluate(X, Y)
    assert trainer.evaluate(source) == pytest.approx(wanted, rel=1e-6)
    assert history["validation_loss"][-1] == pytest.approx(wanted["loss"], rel=1e-6)
    assert_array_equal(trainer.predict(source), trainer.predict(X))
    again = make(models.mlp(), **options)
    again.fit(source)
    same(again.get_state(), trainer.get_state(), 0)
    in_order = [make(models.mlp(), **options, shuffle=False) for _ in range(2)]
    in_order[0].fit(source)
    in_order[1].fit(X, Y)
    same(in_order[0].get_state(), in_order[1].get_state(), 1e-6)


def test_labels_are_encoded_piece_by_piece(store: Write) -> None:
    numbers = np.arange(100) % 3 + 7
    options: Any = {"loss": "softmax_cross_entropy", "epochs": 1, "classes": [9, 8, 7]}
    wanted = make(models.classifier(6), **options).evaluate(X, numbers)
    source = store(X, numbers, buffer=30)
    assert make(models.classifier(6), **options).evaluate(source) == pytest.approx(wanted, rel=1e-6)


def test_a_recipe_names_them(store: Write, tmp_path: Path) -> None:
    source = store(buffer=30)
    onnx.save(models.mlp(), tmp_path / "mlp.onnx")
    fields = source.describe()
    lines = [f"name = '{source.name}'", "path = 'data'", "buffer = 30"]
    if "target" in fields and source.name != "npy":
        lines.append("target = ['y']")
    (tmp_path / "train.toml").write_text(
        "model = 'mlp.onnx'\nloss = 'squared_error'\nepochs = 2\nbackend = 'example_numpy'\n"
        f"progress = false\nbatch_size = 7\nvalidation = {{ {', '.join(lines)} }}\n[data]\n"
        + "\n".join(lines)
    )
    recipe = Recipe.load(tmp_path / "train.toml", plugins=plugins())
    saving = SaveAt(tmp_path / "checkpoint", 20)  # in the second epoch
    trainer = Trainer.from_recipe(recipe, plugins(), callbacks=[saving])
    history = recipe.run(trainer)
    assert history["rows"] == [100.0] * 2
    assert history["validation_loss"][1] < history["validation_loss"][0]
    again = Trainer.from_recipe(recipe, plugins())
    again.restore(saving.written[0])
    assert recipe.run(again)["validation_loss"] == history["validation_loss"]
    same(again.get_state(), trainer.get_state(), 0)


def test_a_folder_is_read_as_what_is_in_it(store: Write, tmp_path: Path) -> None:
    store()
    base = {"model": str(tmp_path / "mlp.onnx"), "loss": "squared_error"}
    onnx.save(models.mlp(), tmp_path / "mlp.onnx")
    recipe = Recipe.from_mapping({**base, "data": str(tmp_path / "data")}, plugins())
    name = recipe.resolved(plugins()).data["name"]
    assert name == next(k for k in KINDS if any((tmp_path / "data").rglob(f"*.{k}")))


def test_values_that_are_not_finite_are_named_by_their_place(store: Write) -> None:
    x = X.copy()
    x[77, 3] = np.inf
    source = store(x, Y, buffer=30)
    with pytest.raises(DataError, match=r"data/b.*rows? \d+.*X has a value that is not finite"):
        make(models.mlp(), epochs=1).fit(source)


def test_backends_are_compared_on_the_first_rows(store: Write) -> None:
    def trainer() -> Any:
        return make(models.mlp(), backend="fused", batch_size=10)

    wanted = compare_backends(trainer(), X[:30], Y[:30], steps=3, backends=["fused"])
    found = compare_backends(trainer(), store(buffer=20), steps=3, backends=["fused"])
    assert found.agree
    assert found.reference_losses == pytest.approx(wanted.reference_losses, rel=1e-6)


def test_what_cannot_be_split_or_is_needed_at_once_is_refused(store: Write) -> None:
    source = store(buffer=30)
    with pytest.raises(DataError, match="do not fit into the shuffle buffer cannot be split"):
        make(models.mlp()).fit(source, validation_data=0.2)
    for given in ((source,), (X, Y)):
        with pytest.raises(
            DataError, match=r"steps_per_epoch is the length .*leave it out \(got 3\)"
        ):
            make(models.mlp()).fit(*given, steps_per_epoch=3)
    with pytest.raises(DataError, match="all rows are needed at once"):
        make(models.mlp()).per_sample_losses(source)
    for wrong in (0, -3, True, 1.5):
        with pytest.raises(ConfigError, match="buffer: "):
            plugins().component("data", {**source.describe(), "buffer": wrong}, "data")


def test_files_that_vanish_or_shrink_while_they_are_used(store: Write, tmp_path: Path) -> None:
    pieces = store(buffer=30).load()
    files = sorted(f for f in (tmp_path / "data").rglob("b*") if f.is_file())
    files += sorted((tmp_path / "data").glob("b/X.npy"))
    last = len(pieces.sizes) - 1
    content = files[0].read_bytes()
    files[0].write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=re.escape(str(files[0]))):
        list(pieces.read(last))
    files[0].unlink()
    with pytest.raises(DataError, match=re.escape(str(files[0]))):
        list(pieces.read(last))
    with pytest.raises(DataError, match=r"no longer exists|can no longer be read: No such file"):
        list(pieces.read(last))


def test_a_file_that_got_fewer_rows_is_noticed(tmp_path: Path) -> None:
    pyarrow()
    for kind in ("parquet", "arrow"):
        path = tmp_path / f"data.{kind}"
        write_table(path, table_of(X, Y), rows=25)
        spec = {"name": kind, "path": str(path), "buffer": 30, "target": ["y"]}
        source = plugins().component("data", spec).load()
        write_table(path, table_of(X[:60], Y[:60]), rows=25)
        trainer = make(models.mlp(), epochs=1, shuffle=False)
        with pytest.raises(
            DataError, match=r"row group 2 has 10 rows now, but it had 25 when it was op"
        ):
            trainer.fit(source)


# ---------------------------------------------------------------------- shards of .npy


def shards(folder: Path, **first: Any) -> NpyFolder:
    """Two shards, the second with other arrays than X and y where they are given."""
    for name, own in (("a", {}), ("b", first)):
        (folder / name).mkdir()
        for key, array in ({"X": X, "y": Y} | own).items():
            if array is not None:
                np.save(folder / name / f"{key}.npy", array)
    return NpyFolder(path=str(folder), buffer=20)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"X": X.astype(np.float64)}, "b/X.npy: has type float64, in {}/a it is float32"),
        ({"X": X[:, :5]}, "b/X.npy: has rows of shape [5], in {}/a they are [6]"),
        ({"y": None}, "b: has no y.npy, which {}/a has; Known: X"),
        ({"z": Y}, "b/z.npy: does not exist in {}/a"),
        ({"y": Y[:50]}, "b: the arrays have different numbers of rows: X has 100, y has 50"),
        ({"X": np.asfortranarray(X)}, "b/X.npy: is in Fortran order"),
        ({"y": np.float32(3)}, "b/y.npy: is a single value, expected at least one row"),
    ],
)
def test_shards_that_differ_are_refused(other: Any, text: str, tmp_path: Path) -> None:
    source = shards(tmp_path, **other)
    with pytest.raises(DataError, match=re.escape(text.format(tmp_path))):
        source.load()


def test_folders_that_are_no_shards(tmp_path: Path) -> None:
    source = shards(tmp_path)
    np.save(tmp_path / "X.npy", X)
    with pytest.raises(DataError, match=r"folders of them, found both: X\.npy and a"):
        source.load()
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match=r"expected \.npy files .*, found none"):
        NpyFolder(path=str(tmp_path / "empty")).load()
    for name, array in (("X", X[:0]), ("y", Y[:0])):
        np.save(tmp_path / "empty" / "a" / f"{name}.npy", array)
    with pytest.raises(DataError, match="the data are empty: 0 rows"):
        NpyFolder(path=str(tmp_path / "empty")).load()


def test_one_folder_is_mapped_or_read_in_pieces(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", Y)
    assert isinstance(NpyFolder(path=str(tmp_path)).load(), Columns)
    pieces = NpyFolder(path=str(tmp_path), buffer=32).load()
    assert isinstance(pieces, Pieces)
    assert pieces.sizes == [2] * 50
    assert pieces.place(10) == f"{tmp_path} from row 20"
    assert head(pieces, 3).inputs["X"].tolist() == X[:3].tolist()


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    import tracemalloc

    peaks = []
    for rows in (2_000, 12_000):
        folder = tmp_path / str(rows)
        for part in range(4):
            (folder / str(part)).mkdir(parents=True)
            np.save(folder / str(part) / "X.npy", np.ones((rows // 4, 100), np.float32))
            np.save(folder / str(part) / "y.npy", np.ones((rows // 4, 1), np.float32))
        source = NpyFolder(path=str(folder), buffer=400)
        trainer = make(models.linear(100), epochs=1, batch_size=100, learning_rate=1e-6)
        trainer.fit(np.ones((200, 100), np.float32), np.ones((200, 1), np.float32))  # compiled
        tracemalloc.start()
        assert trainer.fit(source, validation_data=source)["rows"] == [rows]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    added = 10_000 * 404
    assert peaks[1] - peaks[0] < added / 3


# ---------------------------------------------------------------------- columns of parquet and arrow


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
    path = tmp_path / "bomb.parquet"
    strings = pa.array(["x" * 20_000_000])
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4000, np.int32)), strings)
    table = pa.table({"a": np.zeros(4000, np.float32), "y": column})
    pa.parquet.write_table(table, path, compression="zstd", store_schema=stored)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"bomb\.parquet.* 'y': a string has 20000000"):
        plugins().component("data", {"name": "parquet", "path": str(path)}).load()


def test_rows_with_many_equal_values_are_decoded_in_parts(tmp_path: Path) -> None:
    """A file of some KB whose 16,384 rows have 16,000 values each: no more than 2²⁴ at once."""
    pa = pyarrow()
    path = tmp_path / "wide.parquet"
    values = pa.array(np.zeros(2000 * 16_000, np.float32))
    wide = pa.FixedSizeListArray.from_arrays(values, 16_000)
    table = pa.table({"a": wide, "y": np.zeros(2000, np.float32)})
    pa.parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 100_000
    source = plugins().component("data", {"name": "parquet", "path": str(path), "buffer": 64})
    pieces = source.load()
    sizes = [part.rows for part in pieces.read(0)]
    assert sum(sizes) == 2000
    assert max(sizes) * 16_000 <= 2**24


def test_the_claimed_sizes_of_pages_are_bounded(tmp_path: Path) -> None:
    """Three pages of 2 MiB that claim 128 MiB each: the header has the size, the footer has not."""
    pa = pyarrow()
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2**19, np.float32)), 2**18)
    table = pa.table({"a": wide, "b": wide, "c": wide, "y": np.zeros(2, np.float32)})
    path = tmp_path / "pages.parquet"
    options: dict[str, Any] = {"compression": "zstd", "data_page_size": 2**30}
    pa.parquet.write_table(table, path, use_dictionary=False, **options)

    def load(**parameters: Any) -> Any:
        return plugins().component("data", {"name": "parquet", "path": str(path), **parameters})

    assert load().load().inputs["a"].shape == (2, 2**18)
    group = pa.parquet.ParquetFile(path).metadata.row_group(0)
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


# ---------------------------------------------------------------------- the kit


class TestKit(DataSourceKit):
    @pytest.fixture(params=[None, 30], ids=["at once", "in pieces"])
    def component(self, request: Any, store: Write) -> Any:
        return store(buffer=request.param)

    @pytest.fixture
    def reference(self) -> dict[str, Any]:
        return {"X": X, "y": Y}
