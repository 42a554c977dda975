"""The data source ``tokenized``: ids, masks, labels of every kind of file, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import ConfigError, DataError, DataSourceKit, Recipe
from ortflex_plugins.data.tokenized import Tokenized
from tests.training import plugins

pytestmark = pytest.mark.per_python

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "a", "very"]
NUMBER = {word: k for k, word in enumerate(WORDS)}
TEXTS = ["a good film", "bad", "a very very bad film", "strange film"]
LABELS = [1, 0, 0, 1]
LENGTH = 6


def write_tokenizer(folder: Path, name: str = "tokenizer.json") -> None:
    """Words by white space, between [CLS] and [SEP]."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(NUMBER, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.save(str(folder / name))


def expected(texts: list[str], length: int = LENGTH) -> dict[str, Any]:
    """Ids and masks by hand."""
    ids = np.zeros((len(texts), length), np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        words = [NUMBER.get(word, 1) for word in text.split()][: length - 2]
        whole = [2, *words, 3]
        ids[row, : len(whole)], mask[row, : len(whole)] = whole, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def write(path: Path, **columns: list[Any]) -> None:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = [",".join(columns), *(",".join(f'"{v}"' for v in row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


class TestTokenized(DataSourceKit):
    @pytest.fixture(params=["csv", "jsonl", "parquet"])
    def component(self, folder: Path, request: Any) -> Any:
        path = folder / f"data.{request.param}"
        write(path, text=TEXTS, label=LABELS)
        given = {"name": "tokenized", "path": str(path), "tokenizer": "tokenizer.json"}
        return plugins().component("data", {**given, "length": LENGTH})

    @pytest.fixture
    def reference(self) -> Any:
        return {**expected(TEXTS), "y": np.array(LABELS)}


def source(folder: Path, **options: Any) -> Tokenized:
    path = str(folder / options.pop("file", "data.jsonl"))
    return Tokenized(path=path, tokenizer="tokenizer.json", length=LENGTH, **options)


def test_a_second_text_has_another_type(folder: Path) -> None:
    write(folder / "data.jsonl", text=["good film"], other=["bad"], label=[1])
    found = source(folder, pair="other").load()
    assert found.inputs["input_ids"].tolist() == [[2, 4, 6, 3, 5, 3]]
    assert found.inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("labels", "wanted", "kind"),
    [
        ([1, 2, 0, 1], [1, 2, 0, 1], "i"),
        ([0.5, 2, 0, 1], [0.5, 2, 0, 1], "f"),
        (["no", "yes", "no", "no"], ["no", "yes", "no", "no"], "U"),
    ],
)
@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_labels_are_numbers_or_names(
    folder: Path, ending: str, labels: Any, wanted: Any, kind: str
) -> None:
    numbers = [float(v) if kind == "f" else v for v in labels]
    write(folder / f"data.{ending}", text=TEXTS, label=numbers)
    found = source(folder, file=f"data.{ending}").load().labels["y"]
    assert (found.tolist(), found.dtype.kind) == (wanted, kind)


def test_inputs_labels_and_the_token_that_pads_are_chosen(folder: Path) -> None:
    write(folder / "data.jsonl", text=["film"])
    found = source(folder, target=None, inputs=("input_ids",), pad="very").load()
    assert list(found.inputs) == ["input_ids"]
    assert found.labels == {}
    assert found.inputs["input_ids"].tolist() == [[2, 6, 3, 8, 8, 8]]


def test_a_recipe_finds_the_tokenizer_next_to_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "data").mkdir()
    write_tokenizer(folder / "data")
    write(folder / "data" / "rows.csv", text=TEXTS, label=LABELS)
    (folder / "model.onnx").touch()
    data = '{ name = "tokenized", path = "data/rows.csv", tokenizer = "tokenizer.json" }'
    (folder / "train.toml").write_text(f'model = "model.onnx"\nloss = "log_loss"\ndata = {data}\n')
    monkeypatch.chdir(Path(folder.anchor))
    loaded = Recipe.load(folder / "train.toml")
    assert plugins().component("data", loaded.data).load().rows == len(TEXTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file": "tokenizer.txt"}, r"expected a \.csv, \.jsonl or \.parquet file"),
        ({"text": "txet"}, "no column 'txet'; did you mean 'text'"),
        ({"target": "lable"}, "no column 'lable'; did you mean 'label'"),
        ({"text": "label"}, "row 0 has 1, expected a string"),
        ({"target": "none"}, "column 'none': row 0 has no label"),
        ({"pad": "[PAT]"}, r"no '\[PAT\]'; name a token"),
        ({"file": "broken.jsonl"}, r"broken\.jsonl, line 2: is not JSON"),
        ({"file": "short.csv"}, r"short\.csv, line 2: expected 2 fields"),
        ({"file": "empty.csv"}, "the data are empty"),
    ],
)
def test_errors_about_strings_say_what_is_wrong(folder: Path, options: Any, message: str) -> None:
    write(folder / "data.jsonl", text=TEXTS, label=LABELS, none=[None] * 4)
    (folder / "tokenizer.txt").touch()
    (folder / "broken.jsonl").write_text('{"text": "a", "label": 1}\n{"text": \n')
    (folder / "short.csv").write_text("text,label\na\n")
    (folder / "empty.csv").write_text("text,label\n")
    with pytest.raises(DataError, match=message):
        source(folder, **options).load()


def test_a_broken_or_missing_tokenizer_is_an_error(folder: Path) -> None:
    write(folder / "data.jsonl", text=TEXTS, label=LABELS)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        source(folder).load()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer: the file .* does not exist"):
        source(folder).load()


def test_parameters_are_checked() -> None:
    given = {"name": "tokenized", "path": "a.csv", "tokenizer": "t", "length": 0, "inputs": ["ids"]}
    with pytest.raises(ConfigError, match=r"data\.length: (.|\n)*data\.inputs: must be some of"):
        plugins().component("data", given, "data")
