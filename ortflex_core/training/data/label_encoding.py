"""Conversion of labels for a loss: class labels to indices, one number per row to a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.problem.losses import LossRequest
from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array, TensorSpec
from ortflex_core.training.data import columns as data
from ortflex_core.training.data.columns import Columns


def encode_labels(
    columns: Columns, requests: Sequence[LossRequest], classes: Array | None, model: Model
) -> Columns:
    """Class labels (strings, any integers) as the indices of their scores."""
    labels: dict[str, Array] = {}
    for request in requests:
        array = columns.labels.get(request.label)
        if array is None:
            continue
        text = array.dtype.kind in "OUSb"
        if request.loss.scores != "raw":
            if text and array.dtype.kind != "b":
                raise DataError(
                    f"{request.label!r} has type {array.dtype}, expected numbers for the "
                    f"{request.loss.name} loss; only losses on class scores accept class names"
                )
            continue
        if classes is None:
            if text and array.dtype.kind != "b":
                raise DataError(
                    f"{request.label!r} has labels of type {array.dtype}, but the model does not "
                    "define their order; pass classes=[…]"
                )
            continue
        if array.dtype.kind == "f" and (array.ndim > 1 and array.shape[-1] == len(classes)):
            continue
        if not text and np.array_equal(classes, np.arange(len(classes))):
            continue
        if array.ndim == 1:
            _check_count(classes, model.value(request.predicted))
        labels[request.label] = _encode(array, classes, request.label)
    return attrs.evolve(columns, labels={**columns.labels, **labels}) if labels else columns


def _check_count(classes: Array, scores: TensorSpec) -> None:
    """Refuse classes that are fewer or more than the columns of scores [rows, classes].

    One column has the scores of two classes.
    """
    shape = scores.shape or ()
    count = shape[1] if len(shape) == 2 else None
    if isinstance(count, int) and count > 1 and count != len(classes):
        raise DataError(
            f"there are {len(classes)} classes, but the scores {scores} have {count} columns; pass one "
            "label per column as classes=[…], in their order, or give the model a last layer for your "
            "own classes: head=[…]"
        )


def _encode(array: Array, classes: Array, label: str) -> Array:
    place = {value: k for k, value in enumerate(classes.tolist())}
    flat = np.ravel(array).tolist()
    try:
        codes = [place[value] for value in flat]
    except (KeyError, TypeError):
        row, value = next((k, v) for k, v in enumerate(flat) if v not in place)
        shown = ", ".join(map(repr, classes[:10].tolist()))
        places = range(len(classes))
        numbers = classes.dtype.kind not in "iuf" and all(v in places for v in flat)
        of_places = f"; if they are the places of these classes, classes={[*places]}" * numbers
        raise DataError(
            f"{label!r} has the class {value!r} (row {row}), which is not among the model's classes "
            f"{shown}; pass classes=[…] in the order of the scores, or give the model a last layer for "
            f"your own classes: head=[…]{of_places}"
        ) from None
    return np.asarray(codes, dtype=np.int64).reshape(array.shape)


def with_last_axis(columns: Columns, requests: Sequence[LossRequest], model: Model) -> Columns:
    """Labels [N] reshaped to [N, 1] for a prediction [N, 1], if the loss accepts only the latter.

    Only a last axis of size 1 is added, so the meaning of the labels is unambiguous.
    """
    labels: dict[str, Array] = {}
    for request in requests:
        array = columns.labels.get(request.label)
        shape = model.value(request.predicted).shape or ()
        if array is None or array.ndim + 1 != len(shape) or shape[-1] != 1:
            continue
        seen, fitting = request.seen(model), array[..., np.newaxis]
        if not _accepts(request, seen, array) and _accepts(request, seen, fitting):
            labels[request.label] = fitting
    return attrs.evolve(columns, labels={**columns.labels, **labels}) if labels else columns


def _accepts(
    request: LossRequest, predicted: TensorSpec | Mapping[str, TensorSpec], labels: Array
) -> bool:
    try:
        wanted = calls.label(request.loss, predicted, data.spec_of(request.label, labels))
    except DataError:
        return False
    shape = getattr(wanted, "shape", None)
    return shape is None or len(shape) == labels.ndim
