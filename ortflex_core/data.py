"""Data by column, checked once, and batches of it.

A column is an array whose first axis counts rows; its name is the graph input it feeds. A
:class:`Batch` is a view, (columns, row numbers): engines copy its rows straight into their own
buffers, or keep the columns on the device and gather there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import attrs
import numpy as np

from ortflex_core.errors import DataError, nearest
from ortflex_core.types import Array, Shape, TensorSpec, onnx_dtype, shape_text

Inputs = Any
"""An array (a model with one input), or a mapping from input names to arrays."""


@attrs.frozen(kw_only=True)
class Columns:
    """Inputs, labels and sample weights as the user gave them, by name."""

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
        lengths = {name: len(array) for name, array in self}
        if len(set(lengths.values())) > 1:
            text = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise DataError(f"the data have different numbers of rows: {text}")
        return next(iter(lengths.values()), 0)

    def take(self, rows: Array) -> Columns:
        """The given rows of every column."""
        return Columns(
            inputs={k: v[rows] for k, v in self.inputs.items()},
            labels={k: v[rows] for k, v in self.labels.items()},
            weights={k: v[rows] for k, v in self.weights.items()},
        )


class Batch:
    """Some rows of checked columns.

    Attributes:
        columns: arrays by the name of the graph input they feed.
        rows: which rows, as an index array; None means all of them, in order.
        size: how many rows.
        denominators: one number per loss term: what its Σ w·l is divided by under "mean".
    """

    __slots__ = ("columns", "denominators", "rows", "size")

    def __init__(
        self,
        columns: Mapping[str, Array],
        rows: Array | None,
        size: int,
        denominators: Sequence[float],
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.size = size
        self.denominators = denominators

    def copy(self, name: str, out: Array) -> None:
        """Write a column's rows into ``out``, which has their shape and type."""
        column = self.columns[name]
        if self.rows is None:
            out[...] = column
        else:
            # The mode skips a bounds check and a buffer; the rows are ours and in range.
            column.take(self.rows, axis=0, out=out, mode="clip")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a column's rows."""
        return (self.size, *self.columns[name].shape[1:])

    def array(self, name: str) -> Array:
        """A column's rows."""
        column = self.columns[name]
        return column if self.rows is None else column[self.rows]


class Block(Sequence[Batch]):
    """Several batches of the same size, their rows side by side.

    Attributes:
        columns: arrays by the name of the graph input they feed.
        rows: the row numbers of all batches, one batch after the other.
        size: rows a batch.
        denominators: for every batch, one number per loss term.
    """

    __slots__ = ("columns", "denominators", "rows", "size")

    def __init__(
        self,
        columns: Mapping[str, Array],
        rows: Array,
        size: int,
        denominators: Sequence[Sequence[float]],
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.size = size
        self.denominators = denominators

    def __len__(self) -> int:
        return len(self.denominators)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        k = range(len(self))[index]
        rows = self.rows[k * self.size : (k + 1) * self.size]
        return Batch(self.columns, rows, self.size, self.denominators[k])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one batch of a column."""
        return (self.size, *self.columns[name].shape[1:])

    def copy(self, name: str, out: Array) -> None:
        """Write the rows of all batches into ``out``."""
        self.columns[name].take(self.rows, axis=0, out=out, mode="clip")


def as_columns(
    X: Inputs,
    y: Any,
    sample_weight: Any,
    *,
    inputs: Sequence[str],
    labels: Sequence[str],
) -> Columns:
    """Sort what the user gave into named columns.

    Args:
        X: an array for a model with one input, or a mapping from input names.
        y: an array for a problem with one loss, or a mapping from label names; None without labels.
        sample_weight: an array, a mapping from weight names, or None.
        inputs: names of the inputs the model has.
        labels: names of the labels the losses expect.

    Raises:
        DataError: names are missing or unknown, or several are needed and one was given.
    """
    columns = Columns(
        inputs=_named(X, inputs, "X", "input"),
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


def _named(given: Any, names: Sequence[str], what: str, word: str) -> dict[str, Array]:
    if isinstance(given, Mapping):
        missing = [n for n in names if n not in given]
        unknown = [str(k) for k in given if k not in names]
        if unknown and word == "input":
            raise DataError(f"{what} has {unknown[0]!r}; {nearest(unknown[0], names)}")
        if missing:
            raise DataError(
                f"{what} lacks the {word} {missing[0]!r}; it has {', '.join(map(str, given)) or 'nothing'}"
            )
        return {n: _array(v, f"{what}[{n!r}]") for n, v in given.items()}
    if len(names) != 1:
        raise DataError(
            f"{what} is one array, but there are {len(names)} {word}s: give a mapping "
            f"{{{', '.join(f'{n!r}: …' for n in names)}}}"
        )
    return {names[0]: _array(given, what)}


def _array(value: Any, what: str) -> Array:
    if hasattr(value, "toarray"):
        raise DataError(f"{what} is a sparse matrix; make it dense: {what}.toarray()")
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.ndim == 0:
        raise DataError(f"{what} is a single value, expected one row at least: {array!r}")
    return array


def fit_to(array: Array, spec: TensorSpec, what: str, *, check_finite: bool = True) -> Array:
    """The array in the type and shape of a graph input; copied only where it must be.

    Raises:
        DataError: another shape, a type that would lose meaning (text, complex, floats where
            integers are wanted), or values that are not finite.
    """
    wanted = spec.numpy
    _check_shape(array.shape, spec, what)
    if array.dtype != wanted:
        lossy = array.dtype.kind not in "iufb" or (wanted.kind in "iub" and array.dtype.kind == "f")
        if lossy:
            raise DataError(
                f"{what} has type {array.dtype}, but {spec.name!r} takes {wanted}; "
                f"convert it: {what}.astype({wanted.name!r})"
            )
        with np.errstate(over="ignore"):
            converted = array.astype(wanted)
        if check_finite and wanted.kind == "f" and array.dtype.kind == "f":
            _check_finite(array, what)
        array = converted
    if check_finite and wanted.kind == "f":
        _check_finite(array, what)
    return np.asarray(array, order="C")


def _check_shape(shape: tuple[int, ...], spec: TensorSpec, what: str) -> None:
    want = spec.shape
    if want is None:
        return
    fits = len(shape) == len(want) and all(
        not isinstance(w, int) or h == w for h, w in zip(shape[1:], want[1:], strict=True)
    )
    if fits:
        return
    text = f"{what} has shape {list(shape)}, but {spec.name!r} takes {shape_text(want)}"
    if len(shape) == 1 and len(want) == 2 and want[1] == 1:
        text += f"; reshape it: {what}.reshape(-1, 1)"
    elif len(shape) == 2 and len(want) == 1 and shape[1] == 1:
        text += f"; reshape it: {what}.ravel()"
    raise DataError(text)


def _check_finite(array: Array, what: str) -> None:
    # One pass over the data: a sum is finite if and only if every element is, overflow aside.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum(dtype=np.float64)) or np.isfinite(array).all():
            return
    row = int(np.argwhere(~np.isfinite(array))[0][0])
    raise DataError(
        f"{what} has a value that is not finite (first in row {row}); clean the data, or pass "
        "check_finite=False to train on them all the same"
    )


def spec_of(name: str, array: Array) -> TensorSpec:
    """What an array of labels or weights is, its rows a symbolic dimension; text has no ONNX type here."""
    shape: Shape = ("batch", *array.shape[1:])
    return TensorSpec(name, onnx_dtype(array.dtype) if array.dtype.kind in "iufb" else 8, shape)


class ArrayBatches:
    """Batches of columns in memory (or mapped into it), shuffled without replacement.

    Args:
        columns: checked columns by graph input.
        denominators: per loss term, one number for every row, or an array with one per row.
        batch_size: rows a batch; the last one may be shorter.
    """

    def __init__(
        self,
        columns: Mapping[str, Array],
        denominators: Sequence[float | Array],
        batch_size: int,
    ) -> None:
        self.columns = columns
        self.rows = len(next(iter(columns.values())))
        self.batch_size = min(batch_size, self.rows)
        self._denominators = denominators
        self._starts = range(0, self.rows, self.batch_size)
        self._fixed: list[list[float]] | None = None
        if all(isinstance(d, float) for d in denominators):
            nothing = np.zeros(0, np.int64)
            self._fixed = [self._summed(d, nothing) for d in denominators]

    @property
    def steps(self) -> int:
        """Batches an epoch."""
        return len(self._starts)

    def epoch(
        self, rng: np.random.Generator | None, at_once: int = 1, start: int = 0
    ) -> Iterator[Sequence[Batch]]:
        """Every row once; in the given order without ``rng``. The first ``start`` batches are left out.

        Batches come in groups of ``at_once`` equal ones; what is left over comes one by one.
        """
        order = np.arange(self.rows) if rng is None else rng.permutation(self.rows)
        size = self.batch_size
        uniform = self._fixed is not None
        per_batch = self._fixed or [self._summed(d, order) for d in self._denominators]
        whole = [d[0] for d in per_batch]
        wholes = [whole] * at_once
        full = self.rows // size
        grouped = full - full % at_once if at_once > 1 else 0
        # Groups are where they always are, wherever a training goes on.
        first = min(start + -start % at_once, grouped)

        def single(k: int) -> tuple[Batch]:
            rows = order[k * size : (k + 1) * size]
            denominators = whole if uniform and k < full else [d[k] for d in per_batch]
            return (Batch(self.columns, rows, len(rows), denominators),)

        yield from map(single, range(start, first))
        for k in range(first, grouped, at_once):
            rows = order[k * size : (k + at_once) * size]
            below: Sequence[Sequence[float]] = wholes
            if not uniform:
                below = list(zip(*(d[k : k + at_once] for d in per_batch), strict=True))
            yield Block(self.columns, rows, size, below)
        yield from map(single, range(max(start, grouped), len(self._starts)))

    def _summed(self, denominator: float | Array, order: Array) -> list[float]:
        if isinstance(denominator, float):
            sizes = [min(self.batch_size, self.rows - s) for s in self._starts]
            return [denominator * n for n in sizes]
        return np.add.reduceat(denominator[order], np.asarray(self._starts)).tolist()  # type: ignore[no-any-return]


def iterate(source: Iterable[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """(X, y, sample_weight) of every batch of an iterable.

    A batch is a tuple (X, y) or (X, y, sample_weight), or a mapping with the keys ``X``, ``y`` and
    ``sample_weight``.

    Raises:
        DataError: a batch is something else.
    """
    for k, item in enumerate(source):
        if isinstance(item, Mapping) and "X" in item:
            yield item["X"], item.get("y"), item.get("sample_weight")
        elif isinstance(item, tuple | list) and len(item) in (2, 3):
            yield item[0], item[1], item[2] if len(item) == 3 else None
        else:
            raise DataError(
                f"batch {k} is a {type(item).__name__}; expected (X, y), (X, y, sample_weight) or a "
                "mapping with the keys 'X', 'y', 'sample_weight'"
            )


def split(columns: Columns, fraction: float, seed: int) -> tuple[Columns, Columns]:
    """Training and validation rows, drawn at random with a seed.

    Raises:
        DataError: the fraction leaves one of the two empty.
    """
    rows = columns.rows
    held = round(rows * fraction)
    if not 0 < fraction < 1 or held == 0 or held == rows:
        raise DataError(
            f"validation data as a fraction must leave rows on both sides; {fraction!r} of {rows} "
            f"rows is {held}"
        )
    order = np.random.default_rng([seed, 0x5A11D]).permutation(rows)
    return columns.take(np.sort(order[held:])), columns.take(np.sort(order[:held]))
