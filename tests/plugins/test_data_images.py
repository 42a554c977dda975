"""The data source ``image_folder``: pixels, classes, pieces, broken files."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Columns, ConfigError, DataError, DataSourceKit, Pieces
from ortflex_plugins.data.image_folder import ImageFolder
from tests import models
from tests.training import make, plugins

pytestmark = pytest.mark.per_python

Image = pytest.importorskip("PIL.Image")

SIDE, CLASSES = 6, ("ant", "bee")


def write(folder: Path, rows: int = 3) -> dict[str, Any]:
    """Lossless images, and what they should become: 3 channels, no scaling."""
    rng = np.random.default_rng(0)
    pixels, labels = [], []
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for k in range(rows):
            array = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
            Image.fromarray(array).save(folder / name / f"{k}.png")
            pixels.append(array.transpose(2, 0, 1) / 255)
            labels.append(label)
    return {"X": np.array(pixels, np.float64), "y": np.array(labels)}


class Kit(DataSourceKit):
    buffer: int | None = None

    @pytest.fixture
    def component(self, tmp_path: Path) -> Any:
        write(tmp_path / "photos")
        given = {"name": "image_folder", "path": str(tmp_path / "photos"), "size": [SIDE, SIDE]}
        return plugins().component("data", {**given, "buffer": self.buffer})

    @pytest.fixture
    def reference(self, tmp_path: Path) -> Any:
        return write(tmp_path / "again")


class TestImageFolder(Kit):
    """All in memory."""


class TestImageFolderInPieces(Kit):
    """One by one."""

    buffer = 2


def test_mean_and_std_are_those_of_the_channels(tmp_path: Path) -> None:
    wanted = write(tmp_path)["X"]
    mean, std = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.3, 0.4])
    source = ImageFolder(path=str(tmp_path), size=(SIDE, SIDE), mean=tuple(mean), std=tuple(std))
    found = source.load()
    assert isinstance(found, Columns)
    assert found.inputs["X"].dtype == np.float32
    wanted = (wanted - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(found.inputs["X"], wanted, atol=1e-6)


def test_the_order_of_classes_may_be_given(tmp_path: Path) -> None:
    write(tmp_path)
    found = ImageFolder(path=str(tmp_path), size=(2, 2), classes=("bee", "ant")).load()
    assert isinstance(found, Columns)
    assert found.labels["y"].tolist() == [0, 0, 0, 1, 1, 1]


def test_resizing_cuts_or_stretches(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    left = np.zeros((4, 8, 3), np.uint8)
    left[:, 2:6] = 255  # black borders of 2, which a cut to a square removes
    Image.fromarray(left).save(tmp_path / "one" / "a.png")
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
    exif = Image.Exif()
    exif[0x0112] = 3  # half a turn
    Image.fromarray(array).save(tmp_path / "one" / "a.png", exif=exif)
    found = ImageFolder(path=str(tmp_path), size=(2, 6), channels=1).load()
    assert isinstance(found, Columns)
    np.testing.assert_allclose(found.inputs["X"][0, 0] * 255, array[::-1, ::-1], atol=1e-4)


def test_pieces_train_as_arrays_do(tmp_path: Path) -> None:
    write(tmp_path, rows=8)
    model = models.conv_net(side=SIDE, classes=2)
    losses = []
    for buffer in (None, 3):
        data = ImageFolder(path=str(tmp_path), size=(SIDE, SIDE), buffer=buffer, channels=1)
        assert isinstance(data.load(), Pieces if buffer else Columns)
        trainer = make(model, loss="softmax_cross_entropy", shuffle=False, batch_size=4, epochs=2)
        losses.append(trainer.fit(data).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_images_without_folders_of_classes_have_no_labels(tmp_path: Path) -> None:
    expected = write(tmp_path)["X"][:3]
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
    write(tmp_path)
    given = {"name": "image_folder", "path": str(tmp_path), "size": [4, 4]}
    given |= change(tmp_path) or {}
    with pytest.raises(DataError, match=message):
        plugins().component("data", given).load()


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("size", [4]), ("size", [4, 0]), ("mean", [1, 2]), ("std", [0.0]), ("channels", 4)],
)
def test_parameters_are_checked(parameter: str, value: Any) -> None:
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
