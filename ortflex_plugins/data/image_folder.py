"""The data source ``image_folder``: images in a folder for each class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Columns,
    DataError,
    DataSource,
    Pieces,
    files_digest,
    install_command,
    is_count,
    open_regular,
    read_if_small,
    satisfying,
    setting,
    short_repr,
    suggest,
    usual_buffer,
)
from ortflex_plugins.data._columns import count_or_none

_ENDINGS = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def _sides(value: int | Sequence[int]) -> Any:
    """One number as both sides."""
    return (value, value) if isinstance(value, int) else tuple(value)


_size = satisfying(
    "must be height and width, or one number",
    lambda v: is_count(v) or (isinstance(v, tuple) and len(v) == 2 and all(map(is_count, v))),
)
_channels = satisfying("must be 1 (gray) or 3 (colors)", (1, 3).__contains__)


def _numbers(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    numbers = np.asarray(value, np.float64)
    if len(numbers) not in (1, instance.channels) or not np.isfinite(numbers).all():
        raise ValueError(
            f"ImageFolder.{attribute.name} must be one number, or one for each of {instance.channels} "
            f"channels, got {short_repr(list(value))}"
        )
    if attribute.name == "std" and (numbers <= 0).any():
        raise ValueError(f"ImageFolder.std must be > 0, got {short_repr(list(value))}")


@attrs.frozen(kw_only=True)
class ImageFolder(DataSource):
    """Images in one folder per class: ``path/cat/1.jpg``, ``path/dog/2.png``.

    The images become one float32 input of shape [rows, channels, height, width]. A pixel value v from 0
    to 255 becomes (v / 255 − mean) / std. Labels are int64 class indices of shape [rows]. The classes
    are sorted by name, unless ``classes`` sets another order. Subfolders of a class folder are also
    read. For predictions, or for training with a teacher, the path can be a folder of images without
    class folders, or a single image. In these cases, there are no labels. If the data does not fit into
    the buffer, images are read one at a time during training. In every epoch, the files are read in a new
    random order, so the whole dataset is shuffled even if the buffer is small.

    Raises:
        DataError: pillow is not installed; the folder does not exist; it, or a class, has
            no image; or a file, which is named, is not an image.

    >>> ImageFolder(path="photos", size=[64, 64]).channels
    3

    Source: torchvision.datasets.ImageFolder for the layout of the folders, and
    torchvision.transforms.Resize and CenterCrop for the resizing.
    """

    name: ClassVar[str] = "image_folder"

    path: str = setting(help="the folder with one folder per class")
    size: int | tuple[int, ...] = setting(
        default=(224, 224),
        converter=_sides,
        validator=_size,
        help="the height and width; one number sets both",
    )
    resize: Literal["crop", "stretch"] = setting(
        default="crop",
        validator=attrs.validators.in_(("crop", "stretch")),
        help="``crop`` scales the image and cuts out the center; ``stretch`` scales it to the "
        "exact size",
    )
    channels: int = setting(
        default=3, validator=_channels, help="the number of channels: 3 for RGB, or 1 for grayscale"
    )
    mean: Sequence[float] = setting(
        default=(0.0,),
        validator=_numbers,
        help="the value that is subtracted from the pixel values, which are in [0, 1]; one number, or one "
        "per channel",
    )
    std: Sequence[float] = setting(
        default=(1.0,),
        validator=_numbers,
        help="the value by which the pixel values are divided after the subtraction; one number, or one "
        "per channel",
    )
    classes: Sequence[str] | None = setting(
        default=None, help="the names of the class folders in the order of the labels"
    )
    input: str = setting(
        default="X",
        help="the model input that receives the images; X works for any model with one input",
    )
    buffer: int | None = setting(
        default=None,
        validator=count_or_none(),
        help="the number of images in the buffer; by default, as many as fit into 64 MiB",
    )

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width."""
        assert isinstance(self.size, tuple)
        return self.size[0], self.size[1]

    def load(self) -> Columns | Pieces:
        """Read data that fit into the buffer; of larger data, only the names of the files."""
        return read_if_small(ImagePieces(self))


class ImagePieces(Pieces):
    """Image files, each a piece of one row.

    Raises:
        DataError: pillow, the folder, classes or images are missing.
    """

    sizes: Sequence[int] = ()
    buffer = 0

    def __init__(self, source: ImageFolder) -> None:
        self._pillow = pillow()
        self._source = source
        root = Path(source.path)
        names = _classes(root, source.classes)
        self._files: list[tuple[Path, int | None]] = [
            (file, label) for label, name in enumerate(names) for file in _images(root / name)
        ]
        if not names:
            images = [root] if root.is_file() else _images(root)
            self._files = [(file, None) for file in images]
        self._mean, self._std = (
            np.asarray(values, np.float32).reshape(-1, 1, 1) for values in (source.mean, source.std)
        )
        self.sizes = [1] * len(self._files)
        self.buffer = source.buffer or self._usual_buffer()

    def _usual_buffer(self) -> int:
        height, width = self._source.sides
        row = np.broadcast_to(np.float32(0), (1, self._source.channels, height, width))
        return usual_buffer(Columns(inputs={"X": row}, labels={"y": np.zeros(1, np.int64)}))

    @property
    def digest(self) -> str:
        """Of the files, their classes, and how images become numbers."""
        names = [label for _, label in self._files]
        return files_digest((file for file, _ in self._files), repr(self._source), names)

    def place(self, piece: int) -> str:
        return str(self._files[piece][0])

    def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
        if start:
            return
        file, label = self._files[piece]
        inputs = {self._source.input: self._pixels(file)[None]}
        yield Columns(inputs=inputs, labels={} if label is None else {"y": np.array([label])})

    def _pixels(self, file: Path) -> Array:
        height, width = self._source.sides
        try:
            with open_regular(file) as raw, self._pillow.Image.open(raw) as image:
                _check_pixels(image.size, self._pillow.Image.MAX_IMAGE_PIXELS)
                turned = self._pillow.ImageOps.exif_transpose(image)
                turned = turned.convert("RGB" if self._source.channels == 3 else "L")
                if self._source.resize == "crop":
                    fitted = self._pillow.ImageOps.fit(
                        turned, (width, height), self._pillow.Image.Resampling.BILINEAR
                    )
                else:
                    fitted = turned.resize((width, height), self._pillow.Image.Resampling.BILINEAR)
                values = np.asarray(fitted, np.float32) / 255
        except Exception as error:  # pillow raises many kinds of errors for broken files
            raise DataError(f"{file}: cannot be read as an image: {error}") from error
        first = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
        return np.ascontiguousarray((first - self._mean) / self._std)


def _check_pixels(size: tuple[int, int], most: int | None) -> None:
    """Refuse an image before it is unpacked; pillow warns above its bound, and refuses twice as much."""
    width, height = size
    if most is not None and width * height > most:
        raise ValueError(
            f"it has {width} × {height} pixels, more than {most}; make it smaller, or set "
            "PIL.Image.MAX_IMAGE_PIXELS"
        )


def pillow() -> Any:
    """The package ``PIL``.

    Raises:
        DataError: it cannot be imported.
    """
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise DataError(
            f"images are read by pillow, which cannot be imported ({error}); "
            f"{install_command('images')}"
        ) from error
    return PIL


def _classes(root: Path, given: Sequence[str] | None) -> list[str]:
    if root.is_file():
        return []
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    known = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if given is None or not known:
        return known
    if lost := [name for name in given if name not in known]:
        raise DataError(f"{root}: no folder for the class {lost[0]!r}; {suggest(lost[0], known)}")
    return list(given)


def _images(folder: Path) -> list[Path]:
    files = [p for p in folder.rglob("*") if p.suffix.lower() in _ENDINGS and p.is_file()]
    if not files:
        raise DataError(f"{folder}: no image in this folder (of {', '.join(sorted(_ENDINGS))})")
    return sorted(files)
