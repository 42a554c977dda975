"""The inputs of estimators (X, y and the model) in the form of the graph's inputs."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import onnx

from ortflex_core import Array, DataError, Model, ModelError, TensorSpec, suggest


def given(estimator: Any) -> onnx.ModelProto:
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
    return Model(model).proto


def columns(spec: TensorSpec) -> int | None:
    """The number of elements in a row of a tensor; None if a size is unknown."""
    sizes = _sizes(spec)
    return None if sizes is None else math.prod(sizes)


def as_input(spec: TensorSpec, X: Array) -> Array:
    """X [rows, features] in the type and the shape of the input, for example the shape of images.

    Raises:
        DataError: numbers out of the range of the type.
    """
    return _shaped(spec, _cast(spec, X, "X"))


def as_labels(spec: TensorSpec, y: Array) -> Array:
    """Labels in the type and the shape of the loss's prediction; class numbers are not changed.

    Raises:
        DataError: numbers out of the range of the type.
    """
    return _shaped(spec, _cast(spec, y, "y")) if y.dtype.kind == "f" else y


def _cast(spec: TensorSpec, given: Array, what: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        rows = given.astype(spec.numpy)
    lost = ~np.isfinite(rows) if rows.dtype.kind == "f" else rows != given
    if lost.any():
        row, column = np.argwhere(lost)[0]
        raise DataError(
            f"{what} has {given[row, column]!s} in row {row}, column {column}, which {spec} cannot hold"
        )
    return rows


def _shaped(spec: TensorSpec, rows: Array) -> Array:
    sizes = _sizes(spec)
    if sizes is None or math.prod(sizes) != rows[0].size:
        return rows
    return rows.reshape(len(rows), *sizes)


def _sizes(spec: TensorSpec) -> list[int] | None:
    if not spec.shape:
        return None
    sizes = [d for d in spec.shape[1:] if isinstance(d, int)]
    return sizes if len(sizes) == len(spec.shape) - 1 else None
