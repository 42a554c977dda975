"""Tables as people have them: other delimiters, decimal commas, encodings, categories, missing values."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex_core import DataError, Recipe, Trainer
from ortflex_plugins.data.csv import Csv
from tests import models
from tests.plugins.commands import works

pytestmark = pytest.mark.per_python

ROWS = np.array([[1.5, -2.25, 3], [0.5, 4.125, 1], [1e3, 0.25, 2]])


def written(path: Path, delimiter=",", decimal=".", encoding="utf-8", header="größe{d}b{d}y\n"):
    lines = [delimiter.join(f"{v:.3f}".replace(".", decimal) for v in row) for row in ROWS]
    text = header.replace("{d}", delimiter) + "\n".join(lines) + "\n"
    path.write_bytes(text.encode(encoding))
    return str(path)


@pytest.mark.parametrize(
    ("delimiter", "decimal"), [*((d, ".") for d in ",;\t|"), (";", ","), ("\t", ",")]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_a_dialect_is_found_and_recorded(tmp_path, delimiter, decimal, encoding):
    path = written(tmp_path / "d.csv", delimiter, decimal, encoding)
    source = Csv(path=path)
    columns, found = source.load(), source.found()
    np.testing.assert_array_equal(columns.inputs["X"], ROWS[:, :2].astype(np.float32))
    np.testing.assert_array_equal(columns.labels["y"], ROWS[:, 2])
    assert (found.delimiter, found.decimal, found.header) == (delimiter, decimal, True)
    assert found.load().inputs["X"].tolist() == columns.inputs["X"].tolist()
    assert Csv(path=path, target="größe").load().rows == 3


def test_the_header_is_found(tmp_path):
    path = written(tmp_path / "d.csv", header="")
    assert Csv(path=path, target="2").load().rows == 3
    assert Csv(path=written(tmp_path / "p.csv", header="0{d}1{d}2\n"), target="2").load().rows == 3


def test_what_is_given_is_not_looked_for(tmp_path):
    path = written(tmp_path / "d.csv", ";", ",")
    with pytest.raises(DataError, match="decimal"):
        Csv(path=path, decimal=".").load()
    with pytest.raises(DataError, match="no column 'y'"):
        Csv(path=path, delimiter="|").load()
    for wrong in (
        {"encoding": "hex"},
        {"decimal": "x"},
        {"fill": "mode"},
        {"columns": {"a": "kind"}},
    ):
        with pytest.raises((ValueError, TypeError)):
            Csv(path=path, **wrong)


TABLE = (
    "city;paid;day;size;y\nRom;yes;1970-01-03;1,5;0\nBern;no;1970-01-01;;1\nRom;no;1970-01-02;3;0\n"
)
KINDS = {"city": "category", "paid": "boolean", "day": "date"}


def test_categories_booleans_dates_and_missing_values(tmp_path):
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


def test_other_files_are_read_like_the_training_data(tmp_path):
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


def test_the_validation_of_a_fit_is_read_like_the_training_data(tmp_path):
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
def test_init_writes_what_it_found(tmp_path, monkeypatch, header):
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
