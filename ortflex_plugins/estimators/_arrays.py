"""The inputs of estimators (X, y and the model) in the form of the graph's inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from ortflex_core import Array, DataError, Model, ModelError, TensorSpec, suggest


def given(estimator: Any) -> Model:
    """The model of the parameter ``model``.

    Raises:
        ModelError: the parameter is not a model, or the file cannot be read.
    """
    model = estimator.model
    hint = None
    if isinstance(model, int | list | tuple):  # the first argument of scikit-learn's networks
        hint = f"; for layers of such sizes write hidden_layer_sizes={model!r}"
    elif isinstance(model, str) and not os.path.exists(model):
        hint = f"; there is no such file; {suggest(model, ['linear'])}"
    elif not isinstance(model, str | os.PathLike | bytes | onnx.ModelProto):
        hint = ""
    if hint is not None:
        raise ModelError(
            f"{type(estimator).__name__}.model: expected the path of a file, its bytes, a ModelProto, "
            f"'linear' or None, got {model!r}{hint}"
        )
    return Model(model)


def is_text(spec: TensorSpec) -> bool:
    """Whether a tensor has strings."""
    return spec.dtype == onnx.TensorProto.STRING


def columns(spec: TensorSpec) -> int | None:
    """The number of elements in a row of a tensor; None if a size is unknown."""
    sizes = _sizes(spec)
    return None if sizes is None else math.prod(sizes)


def as_inputs(
    specs: Sequence[TensorSpec], X: Array, names: Sequence[str] | None
) -> Array | dict[str, Array]:
    """X for the inputs of a model: whole, or its columns by their names or in the order of the inputs."""
    if len(specs) == 1:
        return as_input(specs[0], X)
    known = [spec.name for spec in specs]
    if names is not None and sorted(names) != sorted(known):
        raise DataError(
            f"X has the columns {', '.join(map(repr, names))}, and the model has the inputs "
            f"{', '.join(map(repr, known))}; rename the columns, or pass an array with the columns in the "
            "order of the inputs"
        )
    widths = [columns(spec) or 0 for spec in specs]
    if X.ndim != 2 or 0 in widths or X.shape[1] != sum(widths):
        raise DataError(
            f"X has the shape {list(X.shape)}; expected one column for each number of the inputs "
            f"{', '.join(map(str, specs))}"
        )
    if names is not None:
        return {spec.name: as_input(spec, X[:, [list(names).index(spec.name)]]) for spec in specs}
    parts = np.split(X, np.cumsum(widths)[:-1], axis=1)
    return {spec.name: as_input(spec, part) for spec, part in zip(specs, parts, strict=True)}


def as_input(spec: TensorSpec, X: Array) -> Array:
    """X [rows, features] in the type and the shape of the input, for example the shape of images."""
    return _shaped(spec, _texts(spec, X) if is_text(spec) else _cast(spec, X, "X"))


def as_labels(spec: TensorSpec, y: Array) -> Array:
    """Labels in the type and the shape of the loss's prediction; class indices are not changed."""
    return _shaped(spec, _cast(spec, y, "y")) if y.dtype.kind == "f" else y


def _cast(spec: TensorSpec, given: Array, what: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            rows = given.astype(spec.numpy)
        except (TypeError, ValueError) as error:  # an object that is no number
            raise DataError(f"{what} has elements that {spec} cannot hold: {error}") from error
    lost = ~np.isfinite(rows) if rows.dtype.kind == "f" else rows != given
    if lost.any():
        row, column = np.argwhere(lost)[0]
        raise DataError(
            f"{what} has {given[row, column]!s} in row {row}, column {column}, which {spec} cannot hold"
        )
    return rows


def _texts(spec: TensorSpec, given: Array) -> Array:
    wrong = (place for place, value in np.ndenumerate(given) if not isinstance(value, str))
    if place := next(wrong, None):
        where = ", column ".join(map(str, place))
        raise DataError(
            f"X has {given[place]!r} in row {where}; {spec} reads strings: replace missing values by a "
            "word, and numbers by X.astype(str)"
        )
    return given.astype(object)


def _shaped(spec: TensorSpec, rows: Array) -> Array:
    sizes = _sizes(spec)
    if sizes is None or math.prod(sizes) != math.prod(rows.shape[1:]):
        return rows
    return rows.reshape(len(rows), *sizes)


def _sizes(spec: TensorSpec) -> list[int] | None:
    if not spec.shape:
        return None
    sizes = [d for d in spec.shape[1:] if isinstance(d, int)]
    return sizes if len(sizes) == len(spec.shape) - 1 else None
