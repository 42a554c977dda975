"""The preview of `ortflex init --data`: shapes of a file, and the loss that fits its labels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core import Columns, ConfigError, DataError

if TYPE_CHECKING:
    from ortflex_core import Array, Model, Parts, Plugins, TensorSpec

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


@attrs.frozen
class Look:
    """What a file of data has.

    ``spec`` is the value of the key ``data`` of a recipe, ``lines`` describe the arrays, and ``inputs``
    are the names of the inputs.
    """

    spec: Any
    lines: list[str]
    inputs: list[str]
    labels: Array | None
    rows: int
    shapes: dict[str, tuple[int, ...]]
    classes: list[str] | None = None
    """The names of the classes, if the data have them, in the order of the labels."""


def look(path: str, target: str | None, folder: Path, plugins: Plugins, model: Model) -> Look:
    """Read a file or folder of data; the path in ``spec`` is relative to ``folder``.

    A folder with a folder of images for each class has the size that the model takes.

    Raises:
        ConfigError: no data source reads the file, or its source has no ``target``.
        DataError: the file cannot be read, or has no such labels.
    """
    from ortflex_core import Parts

    parts = Parts(plugins)
    if (classes := _image_classes(path)) is not None and "image_folder" in plugins["data"]:
        return _look_at_images(path, classes, folder, parts, model)
    table = parts.as_table("data", path)
    if target is not None:
        table["target"] = target
    source = parts.build("data", table)
    try:
        source = source.proposed()
        loaded = source.load()
    except DataError as error:
        raise DataError(_with_option(str(error), target)) from error
    if not isinstance(loaded, Columns):
        raise ConfigError(
            f"{path}: these data are read piece by piece; add data = … to the recipe yourself"
        )
    named = {**loaded.inputs, **loaded.labels, **loaded.weights}
    lines = [f"{name}: {array.dtype}{list(array.shape)}" for name, array in named.items()]
    relative = Path(os.path.relpath(path, folder)).as_posix()
    fields = attrs.fields(type(source))
    given = {f.name: getattr(source, f.name) for f in fields}
    odd = {f.name: given[f.name] for f in fields if f.default not in (given[f.name], attrs.NOTHING)}
    spec: Any = {
        "name": table["name"],
        "path": relative,
        **({} if target is None else {"target": target}),
    }
    spec |= {key: value for key, value in odd.items() if key not in spec}
    if spec.keys() == {"name", "path"}:
        spec = relative
    labels = next(iter(loaded.labels.values())) if len(loaded.labels) == 1 else None
    shapes = {name: array.shape for name, array in loaded.inputs.items()}
    return Look(spec, lines, list(loaded.inputs), labels, loaded.rows, shapes)


def _image_classes(path: str) -> list[str] | None:
    """The folders of a folder, if the first one has an image; their names are those of classes."""
    if not os.path.isdir(path):
        return None
    names = sorted(p.name for p in Path(path).iterdir() if p.is_dir() and p.name[0] != ".")
    has_images = names and any(p.suffix.lower() in _IMAGES for p in Path(path, names[0]).rglob("*"))
    return names if has_images else None


def _look_at_images(
    path: str, classes: list[str], folder: Path, parts: Parts, model: Model
) -> Look:
    """A folder of images, in the size and with the channels of the model's only input."""
    import numpy as np

    from ortflex_core import shape_text

    [spec, *more] = model.inputs
    shape = spec.shape or ()
    if more or len(shape) != 4 or (isinstance(shape[1], int) and shape[1] not in (1, 3)):
        raise ConfigError(
            f"{path} has images, which become one input [rows, channels, height, width], but the model "
            f"takes {', '.join(map(str, model.inputs))}"
            + (
                "; its channels are on the last axis, which image_folder does not write: save arrays with "
                "numpy instead"
                if len(shape) == 4 and shape[-1] in (1, 3)
                else ""
            )
        )
    channels = 1 if shape[1] == 1 else 3
    size = [side if isinstance(side, int) else 224 for side in shape[2:]]
    table: dict[str, Any] = {
        "name": "image_folder",
        "path": path,
        "size": size,
        "channels": channels,
    }
    if channels == 3:
        table |= {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    else:
        table |= {"mean": [0.5], "std": [0.5]}
    pieces = parts.build("data", table).load()
    rows = pieces.rows if isinstance(pieces, Columns) else sum(pieces.sizes)
    lines = [
        f"{rows} images of {len(classes)} classes ({', '.join(classes[:10])})",
        f"as float32{shape_text(('rows', channels, *size))}: (v / 255 - mean) / std; change mean and std "
        "to those with which the model was trained",
    ]
    table["path"] = Path(os.path.relpath(path, folder)).as_posix()
    labels = np.arange(len(classes))
    shapes = {"X": (rows, channels, *size)}
    return Look(table, lines, ["X"], labels, rows, shapes, classes)


def check_inputs(model: Model, shapes: dict[str, tuple[int, ...]], path: str) -> None:
    """Check that the data have every input of a model, in its shape; ``X`` is that of a model with one.

    Raises:
        ConfigError: an input is missing, or has another shape; with the change that would fit.
    """
    given = list(shapes)
    names = [spec.name for spec in model.inputs]
    missing = [name for name in names if name not in given]
    if not missing or (len(names) == 1 and given == ["X"]):
        for spec in model.inputs:
            name = spec.name if spec.name in shapes else "X"
            _check_shape(spec, name, shapes[name], path)
        return
    or_x = " (or X, if it is the only array besides the labels)" if len(names) == 1 else ""
    raise ConfigError(
        f"{path}: the model takes {_listed(names)}, but the data have {_listed(given)}; missing: "
        f"{_listed(missing)}. Rename arrays in the file to {_listed(names)}{or_x}, or give --data an "
        ".npz file or a folder of .npy files with these names. Nothing was written"
    )


def _check_shape(spec: TensorSpec, name: str, shape: tuple[int, ...], path: str) -> None:
    from ortflex_core import shape_text

    def fits(sizes: tuple[int, ...]) -> bool:
        wanted = spec.shape or ()
        pairs = zip(sizes[1:], wanted[1:], strict=False)
        return len(sizes) == len(wanted) and all(not isinstance(w, int) or w == n for n, w in pairs)

    if spec.shape is None or fits(shape):
        return
    text = f"{path}: {name} has the shape {list(shape)}, but {spec.name!r} takes {shape_text(spec.shape)}"
    if len(shape) == 4 and fits((shape[0], shape[3], shape[1], shape[2])):
        text += f"; its channels are on the last axis: {name}.transpose(0, 3, 1, 2) fits"
    elif len(shape) == 4 and fits((shape[0], shape[2], shape[3], shape[1])):
        text += f"; its channels are on the first axis: {name}.transpose(0, 2, 3, 1) fits"
    elif len(shape) == len(spec.shape) == 2 and isinstance(spec.shape[1], int):
        text += (
            f"; there are {shape[1]} columns of features, expected {spec.shape[1]}: name the label with "
            "--target, and leave out columns that are no features (of a csv file: columns = […])"
        )
    elif len(shape) == 1 and fits((*shape, 1)):
        text += f"; {name}.reshape(-1, 1) fits"
    raise ConfigError(f"{text}. Nothing was written")


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:10])) + (", …" if len(names) > 10 else "")


def _with_option(text: str, target: str | None) -> str:
    """An error about missing labels that names the option of the command, not the key of a recipe."""
    column = "y" if target is None else target
    changed = text.replace('data = { path = …, target = "…" }', "--target NAME")
    if changed == text and f"no column {column!r}" in text:
        changed += "; name the column of labels with --target NAME"
    return changed


def loss_of_labels(model: Model, output: str, labels: Array) -> tuple[str, str] | None:
    """The loss for labels that are classes, and the reason; None for other labels.

    If the scores have the shape [N, C > 1], one whole number or name per row is a class. If there is one
    score per row, labels that are only 0 and 1 are two classes.
    """
    shape = model.value(output).shape
    if shape is None or len(shape) < 2 or labels.dtype.kind not in "iubUSO":
        return None
    one_a_row = labels.ndim == 1 or labels.shape[1:] == (1,)
    classes = shape[1]
    if isinstance(classes, int) and classes > 1 and one_a_row:
        kind = "names" if labels.dtype.kind in "USO" else "whole numbers"
        why = (
            f"{output!r} has {classes} scores per row, and the labels are {kind}, one per row: "
            "classes"
        )
        return "softmax_cross_entropy", why
    if classes == 1 and one_a_row and set(labels.ravel().tolist()) <= {0, 1}:
        return "log_loss", f"{output!r} has one score per row, and the labels are 0 and 1"
    return None
