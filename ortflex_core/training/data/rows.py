"""Datasets of single rows with ``len(data)`` and ``data[k]``, as in torch and Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array

_AT_ONCE = 1024
FORMS = (
    "expected (X, y), (X, y, sample_weight) or a mapping with the keys 'X', 'y', 'sample_weight'; "
    "several inputs are a mapping with their names: ({'a': …, 'b': …}, y)"
)
"""What a row of a dataset, or a batch, may be."""
_THREE = (
    "The three parts of a row or batch are read as (X, y, sample_weight): leave out a part that is no "
    "weight, and give several inputs as a mapping with their names: ({'a': …, 'b': …}, y)"
)
_TORCH_ONLY = ("bfloat16", "float8", "float4")


def gives_rows(X: Any) -> bool:
    """Whether X is a dataset of rows: it has a length and items, and is neither an array nor a collection.

    >>> gives_rows(np.zeros(3)), gives_rows([1, 2]), gives_rows({"X": 1})
    (False, False, False)
    """
    return (
        hasattr(type(X), "__getitem__")
        and hasattr(type(X), "__len__")
        and not isinstance(X, Sequence | Mapping)
        and not any(hasattr(X, name) for name in ("__array__", "toarray", "__dataframe__"))
    )


def has_three(given: Any) -> bool:
    """Whether a row or a batch has a third part, which only its place makes a weight."""
    return isinstance(given, tuple | list) and len(given) == 3


@contextmanager
def reading(three: bool) -> Iterator[None]:
    """Say in an error about labels or weights how ``three`` parts are read.

    >>> with reading(True):  # doctest: +ELLIPSIS
    ...     raise DataError("sample_weight must be >= 0")
    Traceback (most recent call last):
    ortflex_core.kernel.errors.DataError: sample_weight must be >= 0. The three parts ...
    """
    try:
        yield
    except DataError as error:
        about = re.search(r"\b(labels?|y|sample_weight)\b", str(error))
        if not three or about is None or _THREE in str(error):
            raise
        raise DataError(f"{error}. {_THREE}") from error


def stacked(X: Any) -> tuple[Any, Any, Any]:
    """X, y and sample weights of a dataset, whose items are (X, y), (X, y, sample_weight), mappings or X.

    Every row is read once.
    """
    rows = list(_read_rows(X))
    if not rows:
        raise DataError("the data are empty: the dataset has 0 rows")
    first = rows[0]
    if isinstance(first, Mapping):
        columns = _columns(rows, "row")
        if "X" in columns and not set(columns) - {"X", "y", "sample_weight"}:
            return columns["X"], columns.get("y"), columns.get("sample_weight")
        return columns, None, None
    # A tuple of arrays, as torch's TensorDataset has; numbers are a row of X.
    if isinstance(first, tuple) and any(getattr(part, "ndim", 0) for part in first):
        if len(first) > 3:
            raise DataError(f"row 0 of the dataset is a tuple of {len(first)}; {FORMS}")
        if len(first) == 1:
            return _part([row[0] for row in rows], "X"), None, None
    if isinstance(first, tuple | list) and len(first) in (2, 3):
        if any(not isinstance(row, tuple | list) or len(row) != len(first) for row in rows):
            raise DataError(
                "the rows of the dataset have different numbers of elements: the first has "
                f"{len(first)}"
            )
        parts = [_part([row[k] for row in rows], f"part {k}") for k in range(len(first))]
        return parts[0], parts[1], parts[2] if len(parts) == 3 else None
    return _part(rows, "X"), None, None


def _read_rows(X: Any) -> Iterable[Any]:
    """Every row; several at a time if the dataset supports it."""
    several = getattr(X, "__getitems__", None)
    for start in range(0, len(X), _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, len(X)))
        yield from several(list(numbers)) if several is not None else (X[k] for k in numbers)


def _part(values: list[Any], what: str) -> Any:
    return _columns(values, what) if isinstance(values[0], Mapping) else _array(values, what)


def _columns(rows: list[Any], what: str) -> dict[str, Array]:
    names = list(rows[0])
    wrong = [k for k, row in enumerate(rows) if not isinstance(row, Mapping) or list(row) != names]
    if wrong:
        raise DataError(f"{what} {wrong[0]} of the dataset has other names than {', '.join(names)}")
    return {name: _array([row[name] for row in rows], f"{name!r}") for name in names}


def _array(values: list[Any], what: str) -> Array:
    try:
        arrays = [np.asarray(value) for value in values]
    except Exception as error:  # an error of the library that made the values
        raise DataError(
            f"{what} of the dataset cannot be converted to an array: {error}{advice(values[0])}"
        ) from error
    odd = [k for k, array in enumerate(arrays) if array.shape != arrays[0].shape]
    if odd:
        raise DataError(
            f"{what} of the dataset has the shape {list(arrays[odd[0]].shape)} in row {odd[0]} "
            f"and {list(arrays[0].shape)} in row 0; pass rows of one shape (pad them), or batches"
        )
    return np.stack(arrays)


def advice(value: Any) -> str:
    """The end of an error about what numpy cannot convert: a type that it lacks, or X and y together.

    >>> advice(np.zeros(3)), advice([np.zeros(3), np.zeros(3)])
    ('', '')
    """
    name = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if name.startswith(_TORCH_ONLY):
        return f"; numpy has no {name}, convert the tensor: .float()"
    parts = value if isinstance(value, tuple | list) else ()
    if len({tuple(getattr(part, "shape", ())) for part in parts}) < 2:
        return ""
    return (
        "; its arrays have different shapes: pass X and y as two arguments (for step as one batch, "
        "(X, y)), and rows of one shape"
    )
