"""The sources ``image_folder`` and ``tokenized``: pixels, ids, masks, labels, what is wrong with a file."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Columns, ConfigError, DataError, DataSourceKit, Pieces, Recipe
from ortflex_plugins.data.image_folder import ImageFolder
from ortflex_plugins.data.tokenized import Tokenized
from tests import models
from tests.training import make, plugins

pytestmark = pytest.mark.per_python

SIDE, CLASSES = 6, ("ant", "bee")


def pillow() -> Any:
    return pytest.importorskip("PIL.Image")


def write_images(folder: Path, rows: int = 3) -> dict[str, Any]:
    """Lossless images, and what they should become: 3 channels, no scaling."""
    image, rng = pillow(), np.random.default_rng(0)
    pixels, labels = [], []
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for k in range(rows):
            array = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
            image.fromarray(array).save(folder / name / f"{k}.png")
            pixels.append(array.transpose(2, 0, 1) / 255)
            labels.append(label)
    return {"X": np.array(pixels, np.float64), "y": np.array(labels)}


class Images(DataSourceKit):
    buffer: int | None = None

    @pytest.fixture
    def component(self, tmp_path: Path) -> Any:
        write_images(tmp_path / "photos")
        given = {"name": "image_folder", "path": str(tmp_path / "photos"), "size": [SIDE, SIDE]}
        return plugins().component("data", {**given, "buffer": self.buffer})

    @pytest.fixture
    def reference(self, tmp_path: Path) -> Any:
        return write_images(tmp_path / "again")


class TestImageFolder(Images):
    """All in memory."""


class TestImageFolderInPieces(Images):
    """One by one."""

    buffer = 2


def test_mean_and_std_are_those_of_the_channels(tmp_path: Path) -> None:
    wanted = write_images(tmp_path)["X"]
    mean, std = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.3, 0.4])
    source = ImageFolder(path=str(tmp_path), size=(SIDE, SIDE), mean=tuple(mean), std=tuple(std))
    found = source.load()
    assert isinstance(found, Columns)
    assert found.inputs["X"].dtype == np.float32
    wanted = (wanted - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(found.inputs["X"], wanted, atol=1e-6)


def test_the_order_of_classes_may_be_given(tmp_path: Path) -> None:
    write_images(tmp_path)
    found = ImageFolder(path=str(tmp_path), size=(2, 2), classes=("bee", "ant")).load()
    assert isinstance(found, Columns)
    assert found.labels["y"].tolist() == [0, 0, 0, 1, 1, 1]


def test_resizing_cuts_or_stretches(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    left = np.zeros((4, 8, 3), np.uint8)
    left[:, 2:6] = 255  # black borders of 2, which a cut to a square removes
    pillow().fromarray(left).save(tmp_path / "one" / "a.png")
    cut, whole = (
        ImageFolder(path=str(tmp_path), size=(4, 4), resize=how, channels=1).load()  # type: ignore[arg-type]
        for how in ("crop", "stretch")
    )
    assert isinstance(cut, Columns)
    assert isinstance(whole, Columns)
    assert cut.inputs["X"].shape == (1, 1, 4, 4)
    assert (cut.inputs["X"] == 1).all()
    assert (whole.inputs["X"][..., 0] < 0.5).all()
    assert (whole.inputs["X"][..., 1] > 0.5).all()


def test_a_picture_that_a_camera_turned_is_turned_back(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    array = np.arange(12, dtype=np.uint8).reshape(2, 6) * 20
    exif = pillow().Exif()
    exif[0x0112] = 3  # half a turn
    pillow().fromarray(array).save(tmp_path / "one" / "a.png", exif=exif)
    found = ImageFolder(path=str(tmp_path), size=(2, 6), channels=1).load()
    assert isinstance(found, Columns)
    np.testing.assert_allclose(found.inputs["X"][0, 0] * 255, array[::-1, ::-1], atol=1e-4)


def test_pieces_train_as_arrays_do(tmp_path: Path) -> None:
    write_images(tmp_path, rows=8)
    model = models.conv_net(side=SIDE, classes=2)
    losses = []
    for buffer in (None, 3):
        data = ImageFolder(path=str(tmp_path), size=(SIDE, SIDE), buffer=buffer, channels=1)
        assert isinstance(data.load(), Pieces if buffer else Columns)
        trainer = make(model, loss="softmax_cross_entropy", shuffle=False, batch_size=4, epochs=2)
        losses.append(trainer.fit(data).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_images_without_folders_of_classes_have_no_labels(tmp_path: Path) -> None:
    expected = write_images(tmp_path)["X"][:3]
    settings: dict[str, Any] = {"size": SIDE, "mean": (0.0,), "std": (1.0,)}
    folder = ImageFolder(path=str(tmp_path / "ant"), **settings).load()
    single = ImageFolder(path=str(tmp_path / "ant" / "2.png"), **settings).load()
    assert isinstance(folder, Columns)
    assert isinstance(single, Columns)
    assert not folder.labels
    assert not single.labels
    np.testing.assert_allclose(folder.inputs["X"], expected, atol=1e-6)
    np.testing.assert_array_equal(single.inputs["X"], folder.inputs["X"][2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "cow").mkdir(), r"cow: no image in this folder \(of \.bmp"),
        (lambda p: {"classes": ["ant", "be"]}, "no folder for the class 'be'; did you mean 'bee'"),
        (lambda p: (p / "bee" / "1.png").write_bytes(b"no image") and None, "bee/1.png: cannot be"),
    ],
)
def test_errors_about_images_name_the_file(tmp_path: Path, change: Any, message: str) -> None:
    write_images(tmp_path)
    given = {"name": "image_folder", "path": str(tmp_path), "size": [4, 4]}
    given |= change(tmp_path) or {}
    with pytest.raises(DataError, match=message):
        plugins().component("data", given).load()


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("size", [4]), ("size", [4, 0]), ("mean", [1, 2]), ("std", [0.0]), ("channels", 4)],
)
def test_parameters_of_images_are_checked(parameter: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"data.{parameter}: "):
        plugins().component("data", {"name": "image_folder", "path": ".", parameter: value}, "data")


def bomb(width: int, height: int, extra: bytes = b"") -> bytes:
    """A black PNG of one bit for each pixel, written without an image in memory."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        sum_ = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + sum_

    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + extra + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["many pixels", "wide", "text"])
def test_an_image_that_is_a_bomb_is_an_error(kind: str, tmp_path: Path) -> None:
    """20 KB that would be 500 MB: the header says how many pixels, before any is unpacked."""
    pillow()
    text = zlib.compress(bytes(1 << 26), 9)
    chunk = struct.pack(">I", len(text) + 3) + b"zTXta\0\0" + text
    chunk += struct.pack(">I", zlib.crc32(b"zTXta\0\0" + text))
    content = {
        "many pixels": lambda: bomb(12_000, 12_000),
        "wide": lambda: bomb(2**24, 8),
        "text": lambda: bomb(8, 8, chunk),
    }[kind]()
    assert len(content) < 100_000
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(content)
    spec = {"name": "image_folder", "path": str(tmp_path), "size": [4, 4]}
    with pytest.raises(DataError, match=r"1\.png: cannot be read as an image"):
        plugins().component("data", spec).load()


# Texts -------------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "a", "very"]
NUMBER = {word: k for k, word in enumerate(WORDS)}
TEXTS = ["a good film", "bad", "a very very bad film", "strange film"]
LABELS = [1, 0, 0, 1]
LENGTH = 6


def write_tokenizer(folder: Path, name: str = "tokenizer.json") -> None:
    """Words by white space, between [CLS] and [SEP]."""
    tokenizers = pytest.importorskip("tokenizers")
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


def test_parameters_of_texts_are_checked() -> None:
    given = {"name": "tokenized", "path": "a.csv", "tokenizer": "t", "length": 0, "inputs": ["ids"]}
    with pytest.raises(ConfigError, match=r"data\.length: (.|\n)*data\.inputs: must be some of"):
        plugins().component("data", given, "data")
