"""Parquet, arrow and frames read categories, booleans, dates, strings and missing values as csv does."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import DataError, Trainer
from ortflex_plugins.data.arrow import Arrow
from ortflex_plugins.data.csv import Csv
from ortflex_plugins.data.frame import Frame
from ortflex_plugins.data.parquet import Parquet
from tests.models import linear
from tests.plugins.commands import works

pyarrow = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.per_python

DAYS = [datetime.date(1970, 1, d) for d in (3, 1, 2)]
TABLE: dict[str, list[Any]] = {
    "city": ["Rom", "Bern", "Rom"],
    "paid": [True, False, False],
    "day": DAYS,
    "size": [1.5, None, 3.0],
    "y": [0, 1, 0],
}
KINDS = {"city": "category", "paid": "boolean", "day": "date"}
FORMS = ("csv", "parquet", "arrow", "pandas", "polars", "pyarrow")


def source(form: str, folder: Path, table: dict[str, list[Any]], **options: Any) -> Any:
    """The same table in a form."""
    if form == "csv":
        lines = [";".join(table)]
        rows = zip(*table.values(), strict=True)
        lines += [";".join("" if v is None else str(v) for v in row) for row in rows]
        path = folder / f"{len(list(folder.iterdir()))}.csv"
        path.write_text("\n".join(lines) + "\n")
        return Csv(path=str(path), **options)
    arrow = pyarrow.table(table)
    if form in ("parquet", "arrow"):
        path = folder / f"{len(list(folder.iterdir()))}.{form}"
        if form == "parquet":
            parquet.write_table(arrow, path, row_group_size=2)
            return Parquet(path=str(path), **options)
        feather.write_feather(arrow, path)
        return Arrow(path=str(path), **options)
    if form == "pyarrow":
        return Frame(frame=arrow, **options)
    frames = pytest.importorskip(form)
    return Frame(frame=frames.DataFrame(table), **options)


@pytest.mark.parametrize("form", FORMS)
def test_an_unused_column_is_left_out_and_may_be_missing(form: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"columns": {**KINDS, "day": "unused"}, "fill": 0}
    without = {name: values for name, values in TABLE.items() if name != "day"}
    for table in (TABLE, without):
        loaded = source(form, tmp_path, table, **options).load()
        assert loaded.inputs["X"].tolist() == [[1, 1, 1.5], [0, 0, 0], [1, 0, 3]]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_numbers(form: str, tmp_path: Path) -> None:
    years = source(form, tmp_path, TABLE, columns={**KINDS, "day": "year"}, fill="median").load()
    wanted = [(day - datetime.date(2000, 1, 1)).days / 365.25 for day in DAYS]
    np.testing.assert_allclose(years.inputs["X"][:, 2], wanted, rtol=1e-6)
    made = source(form, tmp_path, TABLE, columns=KINDS, fill="median")
    columns = made.load()
    assert columns.inputs["X"].tolist() == [[1, 1, 2, 1.5], [0, 0, 0, 2.25], [1, 0, 1, 3]]
    assert columns.labels["y"].tolist() == [0, 1, 0]
    filled = source(form, tmp_path, TABLE, columns=KINDS, fill={"size": 7})
    assert filled.load().inputs["X"][1, 3] == 7
    given = source(form, tmp_path, TABLE, columns={**KINDS, "city": ["Rom", "Bern"]}, fill=0)
    assert given.load().inputs["X"][:, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": KINDS}, ["size", "fill"]),
        ({"columns": {"paid": "boolean", "day": "date"}, "fill": 0}, ["city", "category"]),
        ({"columns": {**KINDS, "town": "category"}, "fill": 0}, ["town"]),
        ({"columns": {**KINDS, "city": "date"}, "fill": 0}, ["city", "date"]),
        ({"columns": {**KINDS, "city": ["Oslo"]}, "fill": 0}, ["city", "Rom"]),
    ],
)
def test_what_does_not_fit_is_named(form: str, options: Any, words: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        source(form, tmp_path, TABLE, **options).load()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("form", FORMS)
def test_other_data_are_read_like_the_training_data(form: str, tmp_path: Path) -> None:
    first = source(form, tmp_path, TABLE, columns=KINDS, fill="median").found()
    other = {"city": ["Rom"], "paid": [False], "day": [DAYS[2]], "size": [None], "y": [1]}
    if form in ("parquet", "arrow", "pyarrow"):
        other["size"] = pyarrow.array([None], pyarrow.float64())
    alike = source(form, tmp_path, other, columns=KINDS, fill="median").found(first)
    assert alike.load().inputs["X"].tolist() == [[1, 0, 1, 2.25]]
    changed = {**TABLE, "city": ["Rom", "Oslo", "Rom"]}
    strange = source(form, tmp_path, changed, columns=KINDS, fill=1)
    with pytest.raises(DataError, match="'Oslo'"):
        strange.found(first).load()


@pytest.mark.parametrize("form", FORMS)
def test_strings_are_inputs_of_their_own(form: str, tmp_path: Path) -> None:
    made = source(form, tmp_path, TABLE, columns={**KINDS, "city": "string"}, fill=0)
    inputs = made.load().inputs
    assert list(inputs["city"]) == TABLE["city"]
    assert inputs["X"].shape == (3, 3)


@pytest.mark.parametrize("kind", ["Int64", "float64", "Float32", "boolean"])
def test_missing_values_of_pandas_types_are_missing(kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    column = pandas.Series([1, None, 1]).astype(kind)
    whole = pandas.Series([1.0, 2.0, 3.0])
    features = Frame(frame=pandas.DataFrame({"a": column, "y": whole}), fill=7)
    assert features.load().inputs["X"][:, 0].tolist() == [1, 7, 1]
    for labels in (column, pandas.Series(["a", None, "b"], dtype="string")):
        frame = Frame(frame=pandas.DataFrame({"a": whole, "y": labels}))
        with pytest.raises(DataError, match="row 1, column 'y': the label is missing"):
            frame.load()


LISTS = {"tokens": [[5, 6, 7], [8], [9, 10]], "y": [0, 1, 0]}


@pytest.mark.parametrize("form", FORMS[1:])
def test_lists_of_tokens_are_padded_where_it_is_said(form: str, tmp_path: Path) -> None:
    made = source(form, tmp_path, LISTS, pad=0)
    wanted = [[5, 6, 7], [8, 0, 0], [9, 10, 0]]
    tokens = made.load().inputs["X"]
    assert tokens.tolist() == wanted
    assert tokens.dtype == np.int64
    longer = source(form, tmp_path, LISTS, pad=-1, length=4).load().inputs["X"]
    assert longer[1].tolist() == [8, -1, -1, -1]
    short = source(form, tmp_path, {"tokens": [[1]], "y": [0]}, pad=0).found(made.found())
    assert short.load().inputs["X"].shape == (1, 3)
    with pytest.raises(DataError, match="pad"):
        source(form, tmp_path, LISTS).load()
    with pytest.raises(DataError, match="length"):
        source(form, tmp_path, LISTS, pad=0, length=2).load()


def test_ragged_lists_in_arrays_name_the_key() -> None:
    trainer = Trainer(linear(3), loss="squared_error", progress=False)
    for ragged in ([[1.0, 2.0, 3.0], [1.0]], np.array([[1.0], [2.0, 3.0]], object)):
        with pytest.raises(DataError, match="pad"):
            trainer.fit(ragged, np.zeros((2, 1), np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_a_training_and_its_validation(form: str, tmp_path: Path) -> None:
    made = source(form, tmp_path, TABLE, columns=KINDS, fill="median", target=["y"])
    other = {**TABLE, "city": ["Rom", "Rom", "Rom"]}
    held = source(form, tmp_path, other, columns=KINDS, fill="median", target=["y"])
    trainer = Trainer(linear(4), loss="squared_error", epochs=1, progress=False)
    trainer.fit(made, validation_data=held)
    rows = np.array([[1, 1, 2, 1.5], [1, 0, 0, 2.25], [1, 0, 1, 3]], np.float32)
    wanted = trainer.evaluate(rows, np.array([[0], [1], [0]], np.float32))["loss"]
    assert trainer.validation_losses_[-1] == pytest.approx(wanted)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_init_knows_columns(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    table = pyarrow.table(
        {
            "city": rng.choice(["Bern", "Oslo", "Rom"], 60),
            "day": [datetime.datetime(2024, 1, 1 + k % 28) for k in range(60)],
            "size": [None if k == 3 else float(v) for k, v in enumerate(rng.normal(size=60))],
            "y": rng.normal(size=60),
        }
    )
    path = f"d.{ending}"
    (parquet.write_table if ending == "parquet" else feather.write_feather)(table, path)
    onnx.save(linear(3), "m.onnx")
    works("init", "m.onnx", "--data", path, "--target", "y")
    text = Path("train.toml").read_text()
    assert all(word in text for word in ("Bern", "year", "size"))
    works("train", "train.toml", "output=run", "epochs=1")
    works("evaluate", "run")
    works("predict", "run", path)


def strings_model() -> onnx.ModelProto:
    """Y = w · (length of the category as a number) + X · v: reads a string and numbers."""
    return onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>
        g (string[N, 1] city, float[N, 3] X) => (float[N, 1] Y) <float[4, 1] w = {1, 1, 1, 1}>
        { code = ai.onnx.ml.LabelEncoder<keys_strings = ["Bern", "Rom"], values_floats = [0.0, 1.0]>
            (city)  all = Concat<axis = 1>(code, X)  Y = MatMul(all, w) }"""
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_model_reads_strings(form: str, tmp_path: Path) -> None:
    kinds = {**KINDS, "city": "string"}
    made = source(form, tmp_path, TABLE, columns=kinds, fill=0, target=["y"])
    trainer = Trainer(strings_model(), loss="squared_error", epochs=1, progress=False)
    trainer.fit(made)
    scores = trainer.evaluate(made)
    assert np.isfinite(scores["loss"])
