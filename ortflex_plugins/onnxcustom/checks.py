"""Checks of the arguments of the older API, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from onnx import ModelProto

from ortflex_core import Array, DataError, TensorSpec, fit_to


def check_model(onx: Any, name: str = "model_onnx") -> None:
    """Refuse everything but a model in memory.

    Raises:
        TypeError: the argument is something else, for example the path of a file.
    """
    if not isinstance(onx, ModelProto):
        raise TypeError(
            f"{name}: expected an onnx.ModelProto, got {type(onx).__name__}; "
            "onnx.load(path) reads a file, onnx.load_from_string(data) its bytes"
        )


def check_count(name: str, value: Any, least: int, hint: str = "") -> None:
    """Refuse everything but integers of at least ``least``."""
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or value < least:
        text = f"{name}: expected an integer >= {least}, got {value!r}{hint}"
        raise (ValueError if integer else TypeError)(text)


def check_number(name: str, value: Any, *, least: float = 0.0, beyond: bool = False) -> None:
    """Refuse everything but finite numbers of at least ``least``, or above it (``beyond``)."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(
        value, bool
    )
    if not number or not math.isfinite(value) or value < least or (beyond and value == least):
        text = f"{name}: expected a number {'>' if beyond else '>='} {least:g}, got {value!r}"
        raise (ValueError if number else TypeError)(text)


def check_names(name: str, value: Any) -> None:
    """Refuse everything but a list of names with at least one name."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected a list of names, got {value!r}")
    if not list(value):
        raise ValueError(f"{name}: expected at least one name of an initializer, got none")


def fitted(array: Any, spec: TensorSpec, what: str) -> Array:
    """Convert an array to the type and shape of an input."""
    if hasattr(array, "toarray"):
        raise DataError(f"{what} is a sparse matrix, expected an array: {what}.toarray()")
    result = fit_to(np.asarray(array), spec, what, check_finite=False)
    if not result.size:
        raise DataError(f"{what} is empty: its shape is {list(result.shape)}")
    if result.dtype.kind == "f" and not np.isfinite(result).all():
        row = int(np.argwhere(~np.isfinite(result))[0][0])
        raise DataError(f"{what} has a value that is not finite (first in row {row})")
    return result
