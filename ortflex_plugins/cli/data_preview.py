"""The preview of `ortflex init --data`: shapes of a file, and the loss that fits its labels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core import ConfigError, DataError

if TYPE_CHECKING:
    from ortflex_core import Array, Model, Plugins


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


def look(path: str, target: str | None, folder: Path, plugins: Plugins) -> Look:
    """Read a file or folder of data; the path in ``spec`` is relative to ``folder``.

    Raises:
        ConfigError: no data source reads the file, or its source has no ``target``.
        DataError: the file cannot be read, or has no such labels.
    """
    from ortflex_core import Columns, Parts

    parts = Parts(plugins)
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
    return Look(spec, lines, list(loaded.inputs), labels, loaded.rows)


def check_inputs(model: Model, given: list[str], path: str) -> None:
    """Check that the data have every input of a model; ``X`` is the input of a model with one.

    Raises:
        ConfigError: an input is missing.
    """
    names = [spec.name for spec in model.inputs]
    missing = [name for name in names if name not in given]
    if not missing or (len(names) == 1 and given == ["X"]):
        return
    or_x = " (or X, if it is the only array besides the labels)" if len(names) == 1 else ""
    raise ConfigError(
        f"{path}: the model takes {_listed(names)}, but the data have {_listed(given)}; missing: "
        f"{_listed(missing)}. Rename arrays in the file to {_listed(names)}{or_x}, or give --data an "
        ".npz file or a folder of .npy files with these names. Nothing was written"
    )


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
