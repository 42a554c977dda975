"""The preview of `ortflex init --data`: shapes of a file, and the loss that fits its labels."""

from __future__ import annotations

import os
from collections import Counter
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
    in_memory: bool = True
    """Whether all rows are in memory, so that a fraction of them can be held out."""
    repeats_input: bool = False
    """Whether the labels are the numbers of an input, apart from negative ones, which are ignored."""
    loss: tuple[str, str, dict[str, Any]] | None = None
    """The loss of pairs, the reason and its parameters; None: the labels choose the loss."""

    @property
    def stratifies(self) -> bool:
        """Whether the rows have a few classes of two rows or more."""
        labels = self.labels
        if self.classes is not None or labels is None:
            return self.classes is not None
        if labels.ndim > 1 and labels.shape[1:] != (1,):
            return False
        counts = Counter(labels.ravel().tolist())
        return min(counts.values()) >= 2 and len(counts) <= self.rows / 10


def look(
    path: str,
    target: str | None,
    columns: list[str] | None,
    folder: Path,
    plugins: Plugins,
    model: Model,
) -> Look:
    """Read a file or folder of data; the path in ``spec`` is relative to ``folder``.

    A folder with a folder of images for each class has the size that the model takes.
    """
    from ortflex_core import Parts

    parts = Parts(plugins)
    if (classes := _image_classes(path)) is not None and "image_folder" in plugins["data"]:
        return _look_at_images(path, classes, folder, parts, model)
    table = parts.as_table("data", path)
    if target is not None:
        table["target"] = target
    if columns is not None:
        table["columns"] = columns
    source = parts.build("data", table)
    try:
        source = source.proposed()
        loaded = source.load()
    except DataError as error:
        # Pairs of embeddings need no labels.
        if target is not None or not hasattr(source, "target") or _pair(model) is None:
            text = _with_option(str(error), target)
            if "--target NAME" in text and any(
                loss_of_inputs(model, s.name) for s in model.outputs
            ):
                text += ". The labels of a language model are its inputs: save the tokens as y, too"
            raise DataError(text) from error
        source = attrs.evolve(source, target={})
        loaded = source.load()
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
    spec: Any = {"name": table["name"], "path": relative}
    spec |= {} if target is None else {"target": target}
    spec |= {key: value for key, value in odd.items() if key not in spec}
    if spec.keys() == {"name", "path"}:
        spec = relative
    labels = next(iter(loaded.labels.values())) if len(loaded.labels) == 1 else None
    shapes = {name: array.shape for name, array in loaded.inputs.items()}
    repeats = labels is not None and any(_repeats(labels, a) for a in loaded.inputs.values())
    loss = loss_of_pairs(model, loaded)
    return Look(
        spec,
        lines,
        list(loaded.inputs),
        labels,
        loaded.rows,
        shapes,
        repeats_input=repeats,
        loss=loss,
    )


def _repeats(labels: Array, given: Array) -> bool:
    if labels.shape != given.shape or labels.dtype.kind not in "iu" or given.dtype.kind not in "iu":
        return False
    counted = labels >= 0
    return bool(counted.any() and (labels == given)[counted].all())


_ALIKE = ({-1, 1}, {0, 1})
"""The labels of pairs that are similar or not."""


def _pair(model: Model) -> list[str] | None:
    """The only two outputs of a model, if both are embeddings [B, D] of one size D."""
    from ortflex_core import FLOATS

    shapes = {o.name: o.shape or () for o in model.outputs if o.dtype in FLOATS}
    sizes = {shape[1] for shape in shapes.values() if len(shape) == 2}
    two = len(model.outputs) == len(shapes) == 2 and all(len(s) == 2 for s in shapes.values())
    size = next(iter(sizes), None)
    return [*shapes] if two and len(sizes) == 1 and isinstance(size, int) and size > 1 else None


def loss_of_pairs(model: Model, rows: Columns) -> tuple[str, str, dict[str, Any]] | None:
    """The loss of two embeddings without labels, which are pairs, the reason, and its parameters."""
    import numpy as np

    pair, labels = _pair(model), [*rows.labels.values()]
    if pair is not None and not labels:
        why = f"{pair[0]!r} and {pair[1]!r} are embeddings of one size, and the data have no labels: pairs"
        predicted = dict(zip(("anchor", "positive"), pair, strict=True))
        return "contrastive", why, {"predicted": predicted}
    if pair is not None and len(labels) == 1 and {*np.unique(labels[0]).tolist()} in _ALIKE:
        raise ConfigError(
            f"{pair[0]!r} and {pair[1]!r} are embeddings, and the labels say which pairs are similar: "
            "no loss reads these together. Keep the similar pairs and leave the labels out, for the loss "
            "contrastive; or give the model one output [N, 2, D], for cosine_embedding. Nothing was written"
        )
    return None


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
            f"expects {', '.join(map(str, model.inputs))}"
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
    in_memory = isinstance(pieces, Columns)
    return Look(table, lines, ["X"], labels, rows, shapes, classes, in_memory)


def check_inputs(model: Model, shapes: dict[str, tuple[int, ...]], path: str) -> None:
    """Check that the data have every input of a model, in its shape; ``X`` is that of a model with one."""
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
        f"{path}: the model expects {_listed(names)}, but the data have {_listed(given)}; missing: "
        f"{_listed(missing)}. Rename arrays in the file to {_listed(names)}{or_x}, or pass an "
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
    text = f"{path}: {name} has the shape {list(shape)}, but {spec.name!r} expects {shape_text(spec.shape)}"
    if len(shape) == 4 and fits((shape[0], shape[3], shape[1], shape[2])):
        text += f"; its channels are on the last axis: {name}.transpose(0, 3, 1, 2) fits"
    elif len(shape) == 4 and fits((shape[0], shape[2], shape[3], shape[1])):
        text += f"; its channels are on the first axis: {name}.transpose(0, 2, 3, 1) fits"
    elif len(shape) == len(spec.shape) == 2 and isinstance(spec.shape[1], int):
        text += (
            f"; there are {shape[1]} columns of features, expected {spec.shape[1]}: name the label with "
            "--target, and the columns of features of a table with --columns NAME,NAME"
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


def loss_of_inputs(model: Model, output: str) -> tuple[str, str, dict[str, Any]] | None:
    """The loss for labels that are the inputs, the reason, and its parameters; None for other outputs."""
    shape = model.value(output).shape
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int):
        return None
    why = (
        f"{output!r} has {shape[2]} scores for each position, and the labels are the tokens of the "
        "input: each position predicts the next one"
    )
    return "causal_lm", why, {}


def loss_of_labels(
    model: Model, output: str, labels: Array
) -> tuple[str, str, dict[str, Any]] | None:
    """The loss for labels that are classes, the reason, and its parameters; None for other labels.

    If the scores have the shape [N, C > 1], one whole number or name per row is a class; if they have one
    more axis of C classes than whole numbers have axes, these are classes, too. If there is one score per
    row, labels of two different names, or that are only 0 and 1 (or 0.0 and 1.0), are two classes.
    """
    shape = model.value(output).shape
    if shape is None or len(shape) < 2 or labels.dtype.kind not in "iubfUSO":
        return None
    one_a_row = labels.ndim == 1 or labels.shape[1:] == (1,)
    classes = shape[1]
    if labels.dtype.kind == "f" and classes != 1:
        return None
    kind = "names" if labels.dtype.kind in "USO" else "whole numbers"
    if len(shape) == 2 and isinstance(classes, int) and classes > 1 and one_a_row:
        why = (
            f"{output!r} has {classes} scores per row, and the labels are {kind}, one per row: "
            "classes"
        )
        return "softmax_cross_entropy", why, {}
    if classes == 1 and one_a_row:
        found = set(labels.ravel().tolist())
        if found <= {0, 1} or (kind == "names" and len(found) == 2):
            what = "0 and 1" if found <= {0, 1} else "two names"
            return "log_loss", f"{output!r} has one score per row, and the labels are {what}", {}
    if len(shape) > 2 and kind == "whole numbers" and labels.ndim == len(shape) - 1:
        for axis in (1, -1):
            rest = [side for k, side in enumerate(shape) if k != axis % len(shape)][1:]
            pairs = zip(rest, labels.shape[1:], strict=True)
            if isinstance(shape[axis], int) and all(
                not isinstance(w, int) or w == n for w, n in pairs
            ):
                why = f"{output!r} has {shape[axis]} scores for each of the labels, which are whole numbers"
                return "softmax_cross_entropy", why, {"axis": -1} if axis == -1 else {}
    return None


def classes_of_labels(
    model: Model, output: str, labels: Array
) -> tuple[int | list[Any] | None, list[Any] | None]:
    """The values of ``head`` and of ``classes`` for labels that are one class per row; None for no value.

    A new head is for names, or numbers from 0 on, of which there are more than scores, or at most half as
    many; ``classes`` is for names that the file lacks, and for other numbers.
    """
    from ortflex_core import file_classes

    shape = model.value(output).shape or ()
    count = shape[1] if len(shape) == 2 else None
    one_a_row = labels.ndim == 1 or labels.shape[1:] == (1,)
    if not isinstance(count, int) or not one_a_row or labels.dtype.kind not in "iuUSO":
        return None, None
    found = sorted(set(labels.ravel().tolist()))
    known = file_classes(model)
    if known is not None and {*found} <= {*known}:
        return None, None
    if known is not None and labels.dtype.kind in "iu" and {*found} <= {*range(len(known))}:
        return None, [*range(len(known))]  # the places of the classes
    names, size = labels.dtype.kind in "USO", len(found)
    if count == 1:
        return None, found if names and size == 2 else None
    if names:
        return (None, found) if size == count else (found, None)
    if found[0] >= 0 and found[-1] < count and not (found == [*range(size)] and 2 * size <= count):
        return None, None
    if size == count:
        return None, found
    # More numbers than that are no classes.
    few = size <= max(_FEW_CLASSES, len(labels) // 10)
    if not few:
        return None, None
    return (size if found == [*range(size)] else found), None


_FEW_CLASSES = 20
"""The number of different whole numbers up to which they count as classes."""


def few_whole_numbers(labels: Array | None) -> list[float]:
    """The values of labels that are few whole numbers, one per row, of any type; empty for other labels."""
    if labels is None or labels.dtype.kind not in "iuf" or labels.size != len(labels):
        return []
    found = sorted(set(labels.ravel().tolist()))
    whole = all(float(value).is_integer() for value in found)
    return found if whole and len(found) <= _FEW_CLASSES else []


def _as_floats(labels: Array | None) -> str:
    """The end of an error about labels that are classes, but floats; "" for other labels."""
    found = few_whole_numbers(labels)
    if labels is None or labels.dtype.kind != "f" or not found:
        return ""
    return (
        f". The labels are whole numbers of the type {labels.dtype} ({', '.join(map(str, found[:5]))}): if "
        "they are classes, save them as integers: y.astype(numpy.int64), or in a table 0 instead of 0.0"
    )


def check_recipe(
    text: str, folder: Path, plugins: Plugins, data: str, labels: Array | None
) -> None:
    """Check that the data fit the model and the loss of a recipe, without a session."""
    import tempfile

    from ortflex_core import OrtflexError, Parts, Pieces, Recipe, Trainer, internals_of

    try:
        # Its paths are relative to this folder.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".init-", suffix=".toml") as file:
            file.write(text.encode())
            file.flush()
            recipe = Recipe.load(file.name, plugins=plugins)
    except OSError:
        return  # the folder cannot be written to, which is reported when the recipe is written
    try:
        trainer = Trainer.from_recipe(recipe, plugins)
        source = Parts(trainer.plugins).build("data", recipe.data)
        rows = source.load()
        first = next(rows.read(0)) if isinstance(rows, Pieces) else rows
        inner = internals_of(trainer)
        columns = inner.setup.open(first, None, None)
        problem = attrs.evolve(inner.problem, terms=inner.live.terms(columns))
        inner.live.preparing(problem).columns(columns)
    except OrtflexError as error:
        raise ConfigError(f"{data}: {error}{_as_floats(labels)}. Nothing was written") from error
