"""Data by column, checked once.

A column is an array whose first axis counts rows; its name is the graph input it feeds. Sources of
batches are in :mod:`ortflex_core.kernel.batches` (arrays), ``pieces`` (files read piece by piece) and
``iterables`` (iterables of batches).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core.kernel.errors import DataError, suggest
from ortflex_core.kernel.types import Array, Shape, TensorSpec, onnx_dtype, shape_text
from ortflex_core.training.data.rows import advice

Inputs = Any
"""An array (a model with one input), or a mapping from input names to arrays."""


@attrs.frozen(kw_only=True)
class Columns:
    """Inputs, labels and sample weights as passed by the user, by name."""

    inputs: Mapping[str, Array]
    labels: Mapping[str, Array] = attrs.field(factory=dict)
    weights: Mapping[str, Array] = attrs.field(factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        yield from self.inputs.items()
        yield from self.labels.items()
        yield from self.weights.items()

    @property
    def rows(self) -> int:
        """Number of rows.

        Raises:
            DataError: columns of different lengths, or none.
        """
        parts = (self.inputs, self.labels, self.weights)
        counts = {len(array) for part in parts for array in part.values()}
        if len(counts) > 1:
            # A list: an input and a label may have the same name.
            lengths = [(name, len(array)) for name, array in self]
            text = ", ".join(f"{name} has {n}" for name, n in lengths)
            single = "; for a single row, pass X[None] and y[None]" * (1 in counts)
            raise DataError(
                f"the data have different numbers of rows: {text}; pass arrays of equal length{single}"
            )
        return counts.pop() if counts else 0

    def take(self, rows: Array) -> Columns:
        """The given rows of every column."""
        return Columns(
            inputs={k: v[rows] for k, v in self.inputs.items()},
            labels={k: v[rows] for k, v in self.labels.items()},
            weights={k: v[rows] for k, v in self.weights.items()},
        )


def as_columns(
    X: Inputs,
    y: Any,
    sample_weight: Any,
    *,
    inputs: Sequence[str],
    labels: Sequence[str],
    strings: Collection[str] = (),
) -> Columns:
    """Convert the arguments of the user to named columns."""
    columns = Columns(
        inputs=_named(X, inputs, "X", "input", strings),
        labels={} if y is None else _named(y, labels, "y", "label"),
        weights=_weights(sample_weight),
    )
    if not columns.rows:
        raise DataError("the data are empty: 0 rows")
    return columns


def _weights(sample_weight: Any) -> dict[str, Array]:
    if sample_weight is None:
        return {}
    if isinstance(sample_weight, Mapping):
        return {str(k): _array(v, f"sample_weight[{k!r}]") for k, v in sample_weight.items()}
    return {"sample_weight": _array(sample_weight, "sample_weight")}


def _named(
    given: Any, names: Sequence[str], what: str, word: str, strings: Collection[str] = ()
) -> dict[str, Array]:
    if isinstance(given, Mapping):
        missing = [n for n in names if n not in given]
        unknown = [str(k) for k in given if k not in names]
        if unknown and word == "input":
            raise DataError(
                f"{what} has {unknown[0]!r}, which is not an input of the model; "
                f"{suggest(unknown[0], names)}"
            )
        if missing:
            raise DataError(
                f"{what} lacks the {word} {missing[0]!r}; it has {', '.join(map(str, given)) or 'nothing'}"
            )
        return {n: _array(v, f"{what}[{n!r}]") for n, v in given.items()}
    if len(names) > 1 and set(names) <= set(getattr(given, "columns", ())):  # a frame
        return {n: _array(given[n], f"{what}[{n!r}]") for n in names}
    if isinstance(given, list | tuple) and 1 < len(names) == len(given):
        return {n: _array(v, f"{what}[{n!r}]") for n, v in zip(names, given, strict=True)}
    if len(names) != 1:
        is_list = isinstance(given, list | tuple)
        if not is_list and not hasattr(given, "columns"):
            _array(given, what)  # None, a path
        given_as = f"a list of {len(given)}" if is_list else "one array"
        raise DataError(
            f"{what} is {given_as}, but there are {len(names)} {word}s: pass a mapping "
            f"{{{', '.join(f'{n!r}: …' for n in names)}}}, in batches and datasets, too"
        )
    return {names[0]: _array(given, what, is_text=names[0] in strings)}


def _ragged(value: Any) -> str:
    """What is wrong with rows that are lists of different lengths; "" for other rows."""
    if not isinstance(value, list | tuple | np.ndarray):
        return ""
    lengths = [len(row) for row in value if isinstance(row, list | tuple | np.ndarray)]
    other = next((k for k, length in enumerate(lengths) if length != lengths[0]), None)
    if other is None or len(lengths) < len(value):
        return ""
    return (
        f"row {other} has {lengths[other]} values, row 0 has {lengths[0]}; pad the shorter rows, as with "
        'Frame(frame={"tokens": rows, "y": y}, pad=0) of ortflex_plugins.data.frame, or with pad = 0 of '
        "parquet and arrow data in a recipe"
    )


def _no_rows(value: Any, what: str) -> str:
    """What is wrong with an object that numpy takes as one value."""
    if value is None:
        return f"{what} is None, expected an array with one row per sample"
    kind = type(value).__name__
    if isinstance(value, os.PathLike):
        return _no_path(os.fspath(value), what)
    if isinstance(value, Iterable):
        return f"{what} is a {kind}, expected an array; put its rows into one: numpy.stack(list({what}))"
    return f"{what} is a {kind}, expected an array with one row per sample"


def _no_path(value: Any, what: str) -> str:
    return (
        f"{what} is the string {value!r}, expected arrays, a data source or batches; numpy.load "
        "reads .npy and .npz files, ortflex_plugins.data has sources"
    )


def _array(value: Any, what: str, *, is_text: bool = False) -> Array:
    if hasattr(value, "toarray"):
        raise DataError(f"{what} is a sparse matrix; make it dense: {what}.toarray()")
    if np.ma.is_masked(value):
        raise DataError(
            f"{what} has masked values, which would be used; fill them in ({what}.filled(…)), or leave "
            "their rows out"
        )
    try:
        keeps = isinstance(value, np.ndarray) and not isinstance(
            value, np.matrix | np.ma.MaskedArray
        )
        array = value if keeps else np.asarray(value)
    except Exception as error:  # the array is on another device, or a list is ragged
        if ragged := _ragged(value):
            raise DataError(f"{what}: {ragged}") from error
        raise DataError(
            f"{what} cannot be converted to an array: {str(error).rstrip('.')}{advice(value)}"
        ) from error
    if array.ndim == 0 and hasattr(value, "collect"):
        raise DataError(f"{what} is a lazy frame ({type(value).__name__}); pass {what}.collect()")
    if array.ndim == 0 and array.dtype.kind == "O":
        raise DataError(_no_rows(value, what))
    if array.dtype.kind == "O" and (ragged := _ragged(array)):
        raise DataError(f"{what}: {ragged}")
    is_frame = what.startswith("X") and hasattr(value, "columns")
    if array.dtype.kind == "O" and is_frame and not is_text:
        odd = [str(n) for n in value.columns if np.asarray(value[n]).dtype.kind not in "biuf"]
        names = ": " + ", ".join(map(repr, odd[:5])) + (", …" if len(odd) > 5 else "")
        raise DataError(
            f"{what} has columns that are not numeric or have missing values"
            f"{names if odd else ''}; encode them, fill in the missing values, or leave the columns out"
        )
    if array.ndim == 0:
        if array.dtype.kind == "U":
            raise DataError(_no_path(value, what))
        classes = what.startswith("sample_weight")
        hint = "; a weight for each class is the option class_weight of a loss" if classes else ""
        raise DataError(f"{what} is a single value, expected at least one row: {array!r}{hint}")
    return array


def fit_to(array: Array, spec: TensorSpec, what: str, *, check_finite: bool = True) -> Array:
    """The array in the type and shape of a graph input; copied only if necessary.

    Raises:
        DataError: another shape, a type that would lose information (strings, complex, floats for
            integers), integers out of the range of the type, or values that are not finite.
    """
    wanted = spec.numpy
    _check_shape(array.shape, spec, what)
    if spec.dtype == TensorProto.STRING:
        return _texts(array, spec, what)
    if array.dtype != wanted:
        lossy = array.dtype.kind not in "iufb" or (wanted.kind in "iub" and array.dtype.kind == "f")
        if lossy:
            raise DataError(
                f"{what} has type {array.dtype}, but {spec.name!r} expects {wanted}; "
                f"convert it: {what}.astype({wanted.name!r})"
            )
        if array.dtype.kind in "iu" and wanted.kind in "iu":
            _check_range(array, spec, what)
        with np.errstate(over="ignore"):
            converted = array.astype(wanted)
        if check_finite and wanted.kind == "f":
            if array.dtype.kind == "f":
                _check_finite(array, what)
            _check_size(array, converted, spec, what)
        array = converted
    if check_finite and wanted.kind == "f":
        _check_finite(array, what)
    return np.asarray(array, order="C")


def _texts(array: Array, spec: TensorSpec, what: str) -> Array:
    """An array of strings as Python objects, which onnxruntime reads."""
    if array.dtype.kind in "biufcmM":
        raise DataError(
            f"{what} has type {array.dtype}, but {spec.name!r} expects strings; convert it: "
            f"{what}.astype(str)"
        )
    texts = array.astype(object)
    for place, value in np.ndenumerate(texts):
        if not isinstance(value, str | bytes):
            raise DataError(
                f"{what} has {value!r} in row {place[0]}, but {spec.name!r} expects strings; fill in "
                "missing values, and convert numbers with str"
            )
    return texts


def _check_shape(shape: tuple[int, ...], spec: TensorSpec, what: str) -> None:
    want = spec.shape
    if want is None:
        return
    fits = len(shape) == len(want) and all(
        not isinstance(w, int) or h == w for h, w in zip(shape[1:], want[1:], strict=True)
    )
    if fits:
        return
    text = f"{what} has shape {list(shape)}, but {spec.name!r} expects {shape_text(want)}"
    if len(shape) == 1 and len(want) == 2 and want[1] == 1:
        text += f"; reshape it: {what}.reshape(-1, 1)"
    elif len(shape) == 2 and len(want) == 1 and shape[1] == 1:
        text += f"; reshape it: {what}.ravel()"
    elif len(shape) == len(want) - 1 and all(
        not isinstance(w, int) or h == w for h, w in zip(shape, want[1:], strict=True)
    ):
        text += f"; if it is a single row, pass {what}[None]"
    elif axis := _channels(shape, want):
        order = "0, 3, 1, 2" if axis == "last" else "0, 2, 3, 1"
        text += f"; its channels are on the {axis} axis: {what}.transpose({order}) fits"
    raise DataError(text)


def _channels(shape: tuple[int, ...], want: Shape) -> str:
    """Where images have their channels if the model takes them elsewhere; "" if that is not the problem."""
    if len(shape) != 4 or len(want) != 4:
        return ""
    rows, a, b, c = shape
    for axis, sizes in (("last", (rows, c, a, b)), ("first", (rows, b, c, a))):
        if all(not isinstance(w, int) or w == n for w, n in zip(want[1:], sizes[1:], strict=True)):
            return axis
    return ""


def _check_range(array: Array, spec: TensorSpec, what: str) -> None:
    """Refuse integers that the other type cannot represent."""
    held = np.iinfo(spec.numpy)
    if not array.size or (int(array.min()) >= held.min and int(array.max()) <= held.max):
        return
    # Python's integers, because uint64 and int64 have no common type.
    place = next(
        place for place, value in np.ndenumerate(array) if not held.min <= int(value) <= held.max
    )
    raise DataError(
        f"{what} has {array[place]} in row {place[0]}, but {spec.name!r} expects {held.dtype}: numbers "
        f"from {held.min} to {held.max}"
    )


def _check_size(array: Array, converted: Array, spec: TensorSpec, what: str) -> None:
    """Refuse finite numbers that are infinite in the other type."""
    if _is_finite(converted):
        return
    place = tuple(np.argwhere(~np.isfinite(converted))[0])
    raise DataError(
        f"{what} has {array[place]:.4g} in row {place[0]}, but {spec.name!r} expects {spec.numpy}, in "
        "which this is infinite; scale the data"
    )


def _is_finite(array: Array) -> bool:
    # One pass without another array: a finite sum of squares has finite terms only; it may overflow.
    flat = array.ravel("K")
    return math.isfinite(np.vdot(flat, flat)) or bool(np.isfinite(array).all())


def _check_finite(array: Array, what: str) -> None:
    if _is_finite(array):
        return
    row = int(np.argwhere(~np.isfinite(array))[0][0])
    raise DataError(
        f"{what} has a value that is not finite (first in row {row}); clean the data, or pass "
        "check_finite=False to train on them anyway"
    )


def spec_of(name: str, array: Array) -> TensorSpec:
    """The specification of labels or weights, with a symbolic number of rows; strings have no type."""
    shape: Shape = ("batch", *array.shape[1:])
    return TensorSpec(
        name, onnx_dtype(array.dtype) if array.dtype.kind in "iufb" else TensorProto.STRING, shape
    )


def split(
    columns: Columns, fraction: float, seed: int, *, stratify: bool = False
) -> tuple[Columns, Columns]:
    """Training and validation rows, drawn at random with a seed.

    With ``stratify``, both have the classes in the same proportions, up to a row of each class; of a class
    with two rows or more, at least one is in the training, and the single row of a class is.

    Raises:
        DataError: the fraction leaves one of the two empty, or the rows have no classes.
    """
    rows = columns.rows
    held = round(rows * fraction) if 0 < fraction < 1 else 0  # also true for nan
    if held == 0 or held == rows:
        raise DataError(
            "a fraction as validation data must be > 0 and < 1, and leave rows for both training and "
            f"validation; {fraction!r} of {rows} rows "
            + (f"is {held}" if 0 < fraction < 1 else "does not")
        )
    order = np.random.default_rng([seed, 0x5A11D]).permutation(rows)
    if stratify:
        order = _held_first(order, _strata(columns), held)
    return columns.take(np.sort(order[held:])), columns.take(np.sort(order[:held]))


def _strata(columns: Columns) -> Array:
    """The number of the class of each row, in the order of first appearance, which names do not change."""
    keys = []
    for name, labels in columns.labels.items():
        if labels.ndim > 2:
            raise DataError(
                f"stratify: the labels {name!r} have the shape {list(labels.shape)}, expected one class "
                "for each row"
            )
        keys += [
            np.unique(part, return_inverse=True)[1] for part in labels.reshape(len(labels), -1).T
        ]
    if not keys:
        raise DataError("stratify: the data have no labels")
    found, first, places = np.unique(
        np.stack(keys, axis=1), axis=0, return_index=True, return_inverse=True
    )
    if len(found) > columns.rows / 2:
        raise DataError(
            f"stratify: the labels have {len(found)} different values in {columns.rows} rows, so they are "
            "not classes; leave stratify out"
        )
    numbers = np.empty(len(found), np.int64)
    numbers[np.argsort(first)] = np.arange(len(found))
    return numbers[places.reshape(-1)]


def _held_first(order: Array, strata: Array, held: int) -> Array:
    """The same rows with those to hold out first: of each class its share, by the largest remainders."""
    counts = np.bincount(strata)
    shares = counts * (held / len(order))
    taken = np.minimum(np.floor(shares).astype(np.int64), counts - 1)
    rest = np.argsort(-(shares - taken), kind="stable")
    while (missing := held - taken.sum()) > 0:
        free = [k for k in rest if taken[k] < counts[k] - 1]
        if not free:
            raise DataError(
                f"stratify: {held} of {len(order)} rows cannot be held out, because each of the "
                f"{len(counts)} classes needs a row in the training"
            )
        taken[free[:missing]] += 1
    places = [order[strata[order] == k] for k in range(len(counts))]
    first = np.concatenate([rows[:n] for rows, n in zip(places, taken, strict=True)])
    return np.concatenate([first, np.setdiff1d(order, first)])
