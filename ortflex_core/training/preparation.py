"""User data in the form that graphs take: types, shapes, class labels, sample weights, denominators.

All of this is done once for each array, never once for each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core.data import columns as data
from ortflex_core.data.columns import Batch, Columns
from ortflex_core.data.iterables import Batches
from ortflex_core.data.pieces import Pieces, read_if_small
from ortflex_core.errors import DataError, suggest
from ortflex_core.model.model import Model
from ortflex_core.problem.losses import LossRequest
from ortflex_core.problem.problem import LossTerm, Problem
from ortflex_core.programs import stages
from ortflex_core.protocols import DataSource, Device, calls
from ortflex_core.runtime.session import run_once
from ortflex_core.types import Array, TensorSpec


def encode_labels(
    columns: Columns, requests: Sequence[LossRequest], classes: Array | None
) -> Columns:
    """Class labels (strings, any integers) as the indices of their scores.

    Args:
        columns: the user's data.
        requests: the losses; those on raw scores take class labels.
        classes: the labels in the order of the scores, or None if labels are indices from 0 already.

    Raises:
        DataError: a label that is not among the classes, or strings without classes.
    """
    labels = dict(columns.labels)
    for request in requests:
        array = labels.get(request.label)
        if array is None:
            continue
        text = array.dtype.kind in "OUSb"
        if request.loss.scores != "raw":
            if text and array.dtype.kind != "b":
                raise DataError(
                    f"{request.label!r} has type {array.dtype}, expected numbers for the "
                    f"{request.loss.name} loss; only losses on class scores take names of classes"
                )
            continue
        if classes is None:
            if text and array.dtype.kind != "b":
                raise DataError(
                    f"{request.label!r} has labels of type {array.dtype} and the model does not say "
                    "their order; pass it: classes=[…]"
                )
            continue
        if array.dtype.kind == "f" and (array.ndim > 1 and array.shape[-1] == len(classes)):
            continue
        if not text and np.array_equal(classes, np.arange(len(classes))):
            continue
        labels[request.label] = _encode(array, classes, request.label)
    return attrs.evolve(columns, labels=labels)


def _encode(array: Array, classes: Array, label: str) -> Array:
    place = {value: k for k, value in enumerate(classes.tolist())}
    flat = np.ravel(array).tolist()
    try:
        codes = [place[value] for value in flat]
    except (KeyError, TypeError):
        row, value = next((k, v) for k, v in enumerate(flat) if v not in place)
        shown = ", ".join(map(repr, classes[:10].tolist()))
        raise DataError(
            f"{label!r} has the class {value!r} (row {row}), which is not among the model's classes "
            f"{shown}; pass classes=[…] in the order of the scores"
        ) from None
    return np.asarray(codes, dtype=np.int64).reshape(array.shape)


def with_last_axis(columns: Columns, requests: Sequence[LossRequest], model: Model) -> Columns:
    """Labels [N] reshaped to [N, 1] for a prediction [N, 1], if the loss takes only the latter.

    Only a last axis of size 1 is added, so the meaning of the labels is unambiguous.
    """
    labels = dict(columns.labels)
    for request in requests:
        array, predicted = labels.get(request.label), model.value(request.predicted)
        shape = predicted.shape or ()
        if array is None or array.ndim + 1 != len(shape) or shape[-1] != 1:
            continue
        fitting = array[..., np.newaxis]
        if not _takes(request, predicted, array) and _takes(request, predicted, fitting):
            labels[request.label] = fitting
    return attrs.evolve(columns, labels=labels)


def _takes(request: LossRequest, predicted: TensorSpec, labels: Array) -> bool:
    """Whether a loss takes labels of this type and shape."""
    try:
        wanted = request.loss.label(predicted, data.spec_of(request.label, labels))
    except DataError:
        return False
    shape = getattr(wanted, "shape", None)
    return shape is None or len(shape) == labels.ndim


@attrs.frozen
class Preparation:
    """Converts columns to the form that the graphs of a problem take."""

    problem: Problem
    device: Device
    check_finite: bool = True

    def columns(self, given: Columns) -> dict[str, Array]:
        """Every column in the type and shape of the graph input it feeds.

        Raises:
            DataError: see :func:`ortflex_core.data.fit_to`, and labels out of range.
        """
        out = self.inputs(given)
        used = {t.weight_key for t in self.problem.terms if t.weight is not None}
        if ignored := sorted(set(given.weights) - used):
            raise DataError(
                f"these data have sample weights {ignored[0]!r}, but the first batch had none; "
                "give them with every batch or with none"
            )
        for term in self.problem.terms:
            if term.label_key not in given.labels:
                raise DataError(
                    f"these data lack the labels {term.label_key!r} of the {term.loss.name} loss"
                )
            array = given.labels[term.label_key]
            what = f"y[{term.label_key!r}]" if len(self.problem.terms) > 1 else "y"
            fitted = data.fit_to(array, term.label, what, check_finite=self.check_finite)
            calls.check_labels(term.loss, term.predicted, fitted)
            out[term.label.name] = fitted
            if term.weight is not None:
                out[term.weight.name] = self._weight(given, term.weight_key, term.weight)
        return out

    def inputs(self, given: Columns) -> dict[str, Array]:
        """Only the model's inputs, for predictions."""
        out = {}
        for spec in self.problem.model.inputs:
            if spec.name in given.inputs:
                what = f"X[{spec.name!r}]" if len(given.inputs) > 1 else "X"
                array = given.inputs[spec.name]
                out[spec.name] = data.fit_to(array, spec, what, check_finite=self.check_finite)
        return out

    def _weight(self, given: Columns, key: str, spec: TensorSpec) -> Array:
        if key not in given.weights:
            raise DataError(f"these data lack the sample weights {key!r} that the first batch had")
        array = given.weights[key]
        if array.ndim == 1:
            array = array.reshape(-1, *([1] * (len(spec.shape or ()) - 1)))
        fitted = data.fit_to(array, spec, "sample_weight", check_finite=True)
        if fitted.size and fitted.min() < 0:
            row = int(np.argwhere(fitted < 0)[0][0])
            raise DataError(f"sample_weight must be >= 0, row {row} has {fitted[row].min()!r}")
        if fitted.size and not fitted.any() and array.any():
            raise _too_small("sample_weight", float(array.max()), 0, float(array.max()))
        return fitted

    def denominators(self, columns: Mapping[str, Array]) -> list[float | Array]:
        """For each loss term, what a row adds to the denominator of the mean.

        One number if it is equal for all rows, else one per row: Σ w·mask over the row's elements.
        """
        return [self._denominator(term, columns) for term in self.problem.terms]

    def _denominator(self, term: LossTerm, columns: Mapping[str, Array]) -> float | Array:
        program = stages.mask_program(self.problem, term)
        if program is not None:
            values = self.problem.constants()
            ports = self.problem.column_ports
            feeds = {ports[name]: array for name, array in columns.items() if name in ports}
            rows: Array = run_once(program, feeds, values, self.device)["rows"]
            return self._invertible(term, rows)
        elements = self._elements(term, columns)
        if term.weight is None:
            return float(elements)
        weight = columns[term.weight.name]
        rows = weight.reshape(len(weight), -1).sum(axis=1, dtype=np.float64)
        counted = int(np.prod(weight.shape[1:]))
        return self._invertible(term, rows * (elements / counted))

    def _invertible(self, term: LossTerm, rows: Array) -> Array:
        """What rows add to a denominator; refused if its reciprocal overflows float32."""
        positive = rows[rows > 0]
        least = float(positive.min()) if positive.size else 1.0
        if least < _LEAST and self.problem.reduction == "mean":
            what = f"the weights of the {term.loss.name} loss"
            what = what if term.weight is None else "sample_weight"
            raise _too_small(what, least, int(np.argmax(rows == least)), float(rows.max()))
        return rows

    def _elements(self, term: LossTerm, columns: Mapping[str, Array]) -> int:
        """The number of loss values in a row; symbolic sizes are taken from the labels."""
        label = columns[term.label.name]
        sizes = dict(zip(term.label.shape or (), label.shape, strict=False))
        elements = 1
        for size in term.samples[1:]:
            known = size if isinstance(size, int) else sizes.get(size)
            if known is None:
                raise DataError(
                    f"the size {size!r} of the {term.loss.name} loss's values is in neither the model "
                    "nor the labels; use reduction='sum'"
                )
            elements *= known
        return elements

    def batch(self, given: Columns) -> Batch:
        """All rows of the columns as one batch."""
        columns = self.columns(given)
        totals = [
            float(d * given.rows) if isinstance(d, float) else float(d.sum())
            for d in self.denominators(columns)
        ]
        return Batch(columns, None, given.rows, totals)


_LEAST = 1 / float(np.finfo(np.float32).max)


def _too_small(what: str, weight: float, row: int, largest: float) -> DataError:
    return DataError(
        f"{what}: row {row} has the weight {weight:.3g}, whose reciprocal is too large for float32 (the "
        f"smallest weight is {_LEAST:.3g}). The largest is {largest:.3g}; multiply all weights "
        "by a constant, which does not change the mean, or set the weights of rows to be ignored to 0"
    )


def open_source(
    X: Any,
    y: Any,
    sample_weight: Any,
    model: Model,
    requests: Sequence[LossRequest],
) -> Columns:
    """Columns from arrays, mappings, or a data source."""
    if isinstance(X, DataSource):
        X = load(X)
    if isinstance(X, Pieces):
        X = read_if_small(X)
    if isinstance(X, Pieces | Batches):
        raise DataError(
            "these data are read in pieces and do not fit into the shuffle buffer, but all rows are needed "
            "at once here; give arrays, or fewer rows"
        )
    if isinstance(X, Columns):
        names = [i.name for i in model.inputs]
        labels = [r.label for r in requests]
        return _renamed(X, names, labels)
    return data.as_columns(
        X,
        y,
        sample_weight,
        inputs=[i.name for i in model.inputs],
        labels=[r.label for r in requests],
    )


def _renamed(columns: Columns, inputs: Sequence[str], labels: Sequence[str]) -> Columns:
    """Columns X and y of files, renamed to the only input and the only label."""
    given, expected = dict(columns.inputs), dict(columns.labels)
    if len(inputs) == 1 and list(given) == ["X"]:
        given = {inputs[0]: given["X"]}
    if len(labels) == 1 and list(expected) == ["y"]:
        expected = {labels[0]: expected["y"]}
    out = attrs.evolve(columns, inputs=given, labels=expected)
    for name in inputs:
        if name not in given:
            raise DataError(f"the data lack the input {name!r}; {suggest(name, given)}")
    if not out.rows:
        raise DataError("the data are empty: 0 rows")
    return out


def load(source: DataSource) -> Any:
    """The rows that a data source gives."""
    with calls.calling(source, "load"):
        given = source.load()
    if not isinstance(given, Columns | Pieces | Batches):
        raise calls.wrong(source, "load", given, "Columns, Pieces or Batches")
    return given
