"""npz, npy and csv: what comes out as which column, and what is said about broken files."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ortflex_core import Columns, ConfigError, DataError
from ortflex_plugins.data.csv import Csv
from ortflex_plugins.data.npy import NpyFolder
from ortflex_plugins.data.npz import Npz
from tests import models
from tests.training import make, plugins, regression

pytestmark = pytest.mark.per_python

X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([1, 0, 1, 1])


@pytest.fixture(params=["npz", "npy"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Save arrays as one kind of source and open them: ``store(options, **arrays)``."""

    def save(options: dict[str, Any] | None = None, **arrays: Any) -> Columns:
        if request.param == "npz":
            path = tmp_path / "data.npz"
            np.savez(path, **arrays)
        else:
            path = tmp_path / "data"
            path.mkdir()
            for name, array in arrays.items():
                np.save(path / f"{name}.npy", array)
        spec = {"name": request.param, "path": str(path), **(options or {})}
        source = plugins().component("data", spec)
        return source.load()  # type: ignore[no-any-return]

    return save


def test_arrays_are_inputs_but_for_labels_and_weights(store: Any) -> None:
    columns = store(X=X, y=Y, sample_weight=np.full(4, 2.0))
    kinds = [list(kind) for kind in (columns.inputs, columns.labels, columns.weights)]
    assert kinds == [["X"], ["y"], ["sample_weight"]]
    assert_array_equal(columns.inputs["X"], X)
    assert_array_equal(columns.labels["y"], Y)
    assert_array_equal(columns.weights["sample_weight"], [2, 2, 2, 2])


def test_several_inputs_and_labels_by_name(store: Any) -> None:
    options = {"target": {"label/a": "ya", "label/b": "yb"}, "weight": "importance"}
    columns = store(options, left=X, right=X + 1, ya=Y, yb=X[:, :1], importance=np.ones(4))
    assert sorted(columns.inputs) == ["left", "right"]
    assert_array_equal(columns.labels["label/a"], Y)
    assert columns.labels["label/b"].shape == (4, 1)
    assert list(columns.weights) == ["sample_weight"]


@pytest.mark.parametrize(
    ("options", "arrays", "text"),
    [
        (
            {"target": "lable"},
            {"label": Y},
            "there is no such array; choose one, for example data = { path = …, target = ",
        ),
        ({"weight": "w"}, {"y": Y}, "from 'w', but there is no such array; choose one"),
        ({}, {"y": Y[:3]}, "different numbers of rows: X has 4, y has 3"),
        ({}, {"y": Y, "k": np.float32(3)}, "'k' is a single value, expected at least one row"),
    ],
)
def test_names_and_lengths_are_checked(store: Any, options: Any, arrays: Any, text: str) -> None:
    with pytest.raises(DataError, match=re.escape(text)):
        store(options, X=X, **arrays)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"y": Y}, "no column is left for the model's inputs; all are labels or weights: y"),
        ({"X": X[:0], "y": Y[:0]}, "the data are empty: 0 rows"),
        ({"X": X, "y": np.array([object(), 1, 2, 3])}, "Python objects, which are never loaded"),
    ],
    ids=["labels alone", "empty", "Python objects"],
)
def test_arrays_that_are_no_data_are_refused(store: Any, arrays: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        store(**arrays)


def test_a_folder_is_mapped_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", Y)
    columns = NpyFolder(path=str(tmp_path)).load()
    assert isinstance(columns.inputs["X"], np.memmap)


def test_broken_archives_and_folders(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("X,y\n1,2\n")
    np.savez(tmp_path / "cut.npz", X=X, y=Y)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:200])
    np.save(tmp_path / "one.npy", X)
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "X.npy").write_bytes(b"")
    refused: list[tuple[type[Npz | NpyFolder], str, str]] = [
        (Npz, "text.npz", r"expected an \.npz file \(numpy\.savez writes one\)"),
        (Npz, "cut.npz", r"cut\.npz: expected an \.npz file"),
        (Npz, "one.npy", "this holds a single array"),
        (NpyFolder, "one.npy", r"expected a folder of \.npy files, got a file"),
        (NpyFolder, "empty", r"expected \.npy files"),
        (NpyFolder, "hollow", r"X\.npy: is not a complete \.npy file"),
    ]
    for source, name, text in refused:
        with pytest.raises(DataError, match=text):
            source(path=str(tmp_path / name)).load()


def test_training_on_a_source_is_training_on_its_arrays(store: Any) -> None:
    x, y = regression()
    weight = np.linspace(0, 2, len(x), dtype=np.float32)
    from_source, from_arrays = make(models.linear()), make(models.linear())
    columns = store(X=x, y=y, sample_weight=weight)
    assert from_source.fit(columns).losses == from_arrays.fit(x, y, weight).losses
    assert from_arrays.train_losses_ != make(models.linear()).fit(x, y).losses


# ---------------------------------------------------------------------- csv


def table(folder: Path, text: str, **options: Any) -> Columns:
    path = folder / "data.csv"
    path.write_text(text, encoding="utf-8")
    return Csv(path=str(path), **options).load()


def test_features_side_by_side_and_labels_of_their_own_type(tmp_path: Path) -> None:
    text = "a,b,y,w\n1,2.5,3,1\n4,-5e-1,6,0.5\n"
    columns = table(tmp_path, text, weight="w")
    assert columns.inputs["X"].dtype == np.float32
    assert_array_equal(columns.inputs["X"], np.float32([[1, 2.5], [4, -0.5]]))
    assert (columns.labels["y"].dtype, columns.labels["y"].tolist()) == (np.int64, [3, 6])
    assert_array_equal(columns.weights["sample_weight"], np.float32([1, 0.5]))


def test_labels_are_integers_numbers_or_text(tmp_path: Path) -> None:
    for fields, wanted in ((("1", "2.5"), np.float32([1, 2.5])), (("cat", "dog"), ["cat", "dog"])):
        columns = table(tmp_path, f"a,y\n0,{fields[0]}\n0,{fields[1]}\n")
        assert_array_equal(columns.labels["y"], wanted)


def test_a_list_of_targets_is_a_matrix_and_a_mapping_several_labels(tmp_path: Path) -> None:
    text = "a,p,q\n1,2,3\n4,5,6\n"
    assert table(tmp_path, text, target=["q"]).labels["y"].tolist() == [[3], [6]]
    assert table(tmp_path, text, target=["q", "p"]).labels["y"].tolist() == [[3, 2], [6, 5]]
    columns = table(tmp_path, text, target={"label/P": "p", "label/Q": "q"})
    labels = {k: v.tolist() for k, v in columns.labels.items()}
    assert labels == {"label/P": [2, 5], "label/Q": [3, 6]}


def test_columns_are_chosen_and_ordered_by_name(tmp_path: Path) -> None:
    text = "a;id;b;y\n1;x;2;0\n3;x;4;1\n"
    columns = table(tmp_path, text, columns=["b", "a"], delimiter=";", input="features")
    assert columns.inputs["features"].tolist() == [[2, 1], [4, 3]]


def test_what_spreadsheets_write_is_read(tmp_path: Path) -> None:
    # A byte-order mark, quotes, a line break inside quotes, blank lines, Windows line ends.
    path = tmp_path / "data.csv"
    path.write_bytes('\ufeff"a","y"\r\n"1","x ""1"""\r\n\r\n2,"two\nlines"\r\n'.encode())
    columns = Csv(path=str(path)).load()
    assert columns.inputs["X"].tolist() == [[1], [2]]
    assert columns.labels["y"].tolist() == ['x "1"', "two\nlines"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,y\n1,2\n3,x\n", {}, "line 3, column 'y': expected a number as in the other rows"),
        ("a,y\n1,cat\n3,7\n", {}, "line 3, column 'y': expected a class name as in the other"),
        ("a,y\n1,2\n,3\n", {}, "line 3, column 'a': expected a number, got ''"),
        ("a,y\n\n1,2\n3,4\nx,5\n", {}, "line 5, column 'a': expected a number, got 'x'"),
        ("a,y\n1,2\n3\n", {}, "line 3: expected 2 fields as in line 1, got 1 with the"),
        ("a,y\n1,2\n", {"target": "z"}, "no column 'z'; Known: a, y"),
        ("alpha,y\n1,2\n", {"columns": ["alfa"]}, "no column 'alfa'; did you mean 'alpha'?"),
        ("a,y\n1,2\n", {"weight": "w"}, "no column 'w'; Known: a, y"),
        ("a,b,a,y\n1,2,3,4\n", {}, "line 1: two columns are named 'a'"),
        ("a,b,b\n1,2,3\n", {"target": "a"}, "line 1: two columns are named 'b'"),
        ("a,a,a\n1,2,3\n", {"target": "a"}, "line 1: two columns are named 'a'"),
        ("a,y\n", {}, "expected a header and rows, found only a header"),
        ("", {}, "expected a header and rows, found nothing"),
        ("y\n1\n", {}, "no column is left for the features; all are labels or weights"),
    ],
)
def test_errors_say_where(tmp_path: Path, text: str, options: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)) as raised:
        table(tmp_path, text, **options)
    assert str(tmp_path / "data.csv") in str(raised.value)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes("a,y\nä,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="expected text in utf-8"):
        Csv(path=str(tmp_path / "latin.csv"), encoding="utf-8").load()
    with pytest.raises(ConfigError, match=r"^data\.delimiter: must be one character, got ';;'$"):
        plugins().component("data", {"name": "csv", "path": "x", "delimiter": ";;"}, "data")


@pytest.mark.parametrize("target", ["c7", [f"c{k}" for k in range(50_000)]])
def test_csv_of_100_000_columns_is_read_in_time_linear_in_them(
    tmp_path: Path, target: str | list[str]
) -> None:
    """Every search among the columns is a look-up: quadratic ones took minutes for this file."""
    count = 100_000
    path = tmp_path / "wide.csv"
    lines = [",".join(f"c{k}" for k in range(count)), ",".join(map(str, range(count)))]
    path.write_text("\n".join(lines))
    before = time.process_time()
    columns = Csv(path=str(path), target=target).load()
    assert time.process_time() - before < 30
    taken = {7} if isinstance(target, str) else set(range(50_000))
    left = [k for k in range(count) if k not in taken]
    np.testing.assert_array_equal(columns.inputs["X"][0], np.array(left, np.float32))
