"""npz, npy and csv: what comes out as which column, what is said of broken files, tables of people."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.testing import assert_array_equal

from ortflex_core import Columns, ConfigError, DataError, Recipe, Trainer
from ortflex_plugins.data.csv import Csv
from ortflex_plugins.data.npy import NpyFolder
from ortflex_plugins.data.npz import Npz
from tests import models
from tests.plugins.commands import works
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


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        pytest.param("parquet", "pyarrow", "parquet", marks=pytest.mark.once),
        ("image_folder", "PIL", "images"),
        ("tokenized", "tokenizers", "text"),
    ],
)
def test_without_its_package_a_source_says_what_to_install(
    name: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for file in ("a.parquet", "tokenizer.json"):
        (tmp_path / file).touch()
    (tmp_path / "data.jsonl").write_text('{"text": "a", "label": 1}\n')
    given = {"path": str(tmp_path)}
    if name == "tokenized":
        given = {"path": str(tmp_path / "data.jsonl"), "tokenizer": "tokenizer.json"}
    source = plugins().component("data", {"name": name, **given})
    with pytest.raises(DataError, match=rf"pip install .*\[{extra}\]"):
        source.load()


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


# ------------------------ csv of people: delimiters, decimals, encodings, categories, missing values

ROWS = np.array([[1.5, -2.25, 3], [0.5, 4.125, 1], [1e3, 0.25, 2]])


def written(
    path: Path,
    delimiter: str = ",",
    decimal: str = ".",
    encoding: str = "utf-8",
    header: str = "größe{d}b{d}y\n",
) -> str:
    lines = [delimiter.join(f"{v:.3f}".replace(".", decimal) for v in row) for row in ROWS]
    text = header.replace("{d}", delimiter) + "\n".join(lines) + "\n"
    path.write_bytes(text.encode(encoding))
    return str(path)


@pytest.mark.parametrize(
    ("delimiter", "decimal"), [*((d, ".") for d in ",;\t|"), (";", ","), ("\t", ",")]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_a_dialect_is_found_and_recorded(
    tmp_path: Path, delimiter: str, decimal: str, encoding: str
) -> None:
    path = written(tmp_path / "d.csv", delimiter, decimal, encoding)
    source = Csv(path=path)
    columns, found = source.load(), source.found()
    np.testing.assert_array_equal(columns.inputs["X"], ROWS[:, :2].astype(np.float32))
    np.testing.assert_array_equal(columns.labels["y"], ROWS[:, 2])
    assert (found.delimiter, found.decimal, found.header) == (delimiter, decimal, True)
    assert found.load().inputs["X"].tolist() == columns.inputs["X"].tolist()
    assert Csv(path=path, target="größe").load().rows == 3


def test_the_header_is_found(tmp_path: Path) -> None:
    path = written(tmp_path / "d.csv", header="")
    assert Csv(path=path, target="2").load().rows == 3
    assert Csv(path=written(tmp_path / "p.csv", header="0{d}1{d}2\n"), target="2").load().rows == 3


def test_what_is_given_is_not_looked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "d.csv", ";", ",")
    with pytest.raises(DataError, match="decimal"):
        Csv(path=path, decimal=".").load()
    with pytest.raises(DataError, match="no column 'y'"):
        Csv(path=path, delimiter="|").load()
    wrong: dict[str, Any] = {"encoding": "hex", "decimal": "x", "fill": "mode", "target": []}
    for key, value in {**wrong, "columns": {"a": "kind"}}.items():
        with pytest.raises((ValueError, TypeError)):
            Csv(path=path, **{key: value})


TABLE = (
    "city;paid;day;size;y\nRom;yes;1970-01-03;1,5;0\nBern;no;1970-01-01;;1\nRom;no;1970-01-02;3;0\n"
)
KINDS = {"city": "category", "paid": "boolean", "day": "date"}


def test_categories_booleans_dates_and_missing_values(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text(TABLE)
    columns = Csv(path=str(path), columns=KINDS, fill="median").load()
    assert columns.inputs["X"].tolist() == [[1, 1, 2, 1.5], [0, 0, 0, 2.25], [1, 0, 1, 3]]
    filled = Csv(path=str(path), columns=KINDS, fill={"size": 7}).load()
    assert filled.inputs["X"][1, 3] == 7
    with pytest.raises(DataError, match=r"line 3, column 'size'.*fill"):
        Csv(path=str(path), columns=KINDS).load()
    with pytest.raises(DataError, match=r"line 2, column 'city'.*category"):
        Csv(path=str(path), fill=0).load()


def test_other_files_are_read_like_the_training_data(tmp_path: Path) -> None:
    """A file with fewer categories and other numbers has the same codes and the same median."""
    train, other = tmp_path / "train.csv", tmp_path / "other.csv"
    train.write_text(TABLE)
    other.write_text("city;paid;day;size;y\nRom;no;1970-01-02;;1\n")
    first = Csv(path=str(train), columns=KINDS, fill="median").found()
    alike = Csv(path=str(other), columns=KINDS, fill="median").found(first)
    assert alike.load().inputs["X"].tolist() == [[1, 0, 1, 2.25]]
    other.write_text("city;paid;day;size;y\nOslo;no;1970-01-02;1;1\n")
    with pytest.raises(DataError, match="'Oslo'"):
        alike.load()


def test_the_validation_of_a_fit_is_read_like_the_training_data(tmp_path: Path) -> None:
    """Another file has fewer categories and no median; those of the training count."""
    train, other = tmp_path / "train.csv", tmp_path / "other.csv"
    train.write_text(TABLE)
    other.write_text("city;paid;day;size;y\nRom;no;1970-01-02;;1\n")
    onnx.save(models.linear(4), tmp_path / "m.onnx")
    sources = [Csv(path=str(p), columns=KINDS, fill="median") for p in (train, other)]
    trainer = Trainer(tmp_path / "m.onnx", loss="squared_error", epochs=1, progress=False)
    trainer.fit(sources[0], validation_data=sources[1])
    row, label = np.array([[1, 0, 1, 2.25]], np.float32), np.ones((1, 1), np.float32)
    assert trainer.validation_losses_[-1] == trainer.evaluate(row, label)["loss"]


@pytest.mark.parametrize("header", [True, False])
def test_init_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bool
) -> None:
    """From the file of a spreadsheet to predictions, with the mapping of the training data."""
    monkeypatch.chdir(tmp_path)
    onnx.save(models.linear(4), "m.onnx")
    rng = np.random.default_rng(1)
    cities = rng.choice(["Bern", "Oslo", "Rom"], 60)
    lines = [
        f"{c};{v:.2f};{w:.2f};{'' if k == 5 else k};{v + w:.2f}".replace(".", ",")
        for k, (c, v, w) in enumerate(zip(cities, *rng.normal(size=(2, 60)), strict=True))
    ]
    names = "city;a;b;c;y\n" if header else ""
    Path("d.csv").write_text(names + "\n".join(lines) + "\n")
    works("init", "m.onnx", "--data", "d.csv", "--target", "y" if header else "4")
    data = Recipe.load("train.toml").data
    column = "city" if header else "0"
    assert dict(data["columns"]) == {column: ("Bern", "Oslo", "Rom")}
    assert (data["delimiter"], data["decimal"], data["header"]) == (";", ",", header)
    trained = works("train", "train.toml", "epochs=2", "output=run")
    assert "warning" not in trained.output.lower()
    kept = Recipe.load("run/recipe.toml").data
    assert (kept["delimiter"], dict(kept["columns"])) == (";", dict(data["columns"]))
    Path("new.csv").write_text(names + "\n".join(line for line in lines if line[0] == "R") + "\n")
    scores = json.loads(works("evaluate", "run", "new.csv", "--json").stdout)
    assert scores["loss"] > 0
