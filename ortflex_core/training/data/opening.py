"""Columns from the data of a user: arrays, mappings of arrays, a data source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from onnx import TensorProto

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.problem.losses import LossRequest
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.engine_protocols import DataSource
from ortflex_core.kernel.errors import DataError, suggest
from ortflex_core.kernel.types import Array
from ortflex_core.training.data import columns as data
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.iterables import Batches
from ortflex_core.training.data.pieces import Pieces, read_if_small

_LABELS = ("y", "label", "labels", "target")
"""The names of the labels of a problem with one loss, in a mapping that has inputs and labels."""


def as_found(data: Any, like: Any = None) -> Any:
    """A data source with what it, or ``like``, finds in its files, such as codes; other data unchanged."""
    if not isinstance(data, DataSource):
        return data
    with calling(data, "found"):
        return data.found(like if isinstance(like, DataSource) else None)


def open_source(
    X: Any,
    y: Any,
    sample_weight: Any,
    model: Model,
    requests: Sequence[LossRequest],
    *,
    predicting: bool = False,
) -> Columns:
    """Columns from arrays, mappings, or a data source.

    For predictions, they may lack the inputs that only losses read.
    """
    if isinstance(X, DataSource):
        X = load(X, labeled=any(r.loss.needs_labels for r in requests))
    if isinstance(X, Pieces):
        X = read_if_small(X)
    if isinstance(X, Pieces | Batches):
        raise DataError(
            "these data are read in pieces and do not fit into the shuffle buffer, but all rows "
            "are needed at once here; pass arrays, or fewer rows"
        )
    inputs = [i.name for i in model.inputs if i.name not in model.drawn_again]
    if predicting and model.loss_inputs:
        names = X.inputs if isinstance(X, Columns) else X if isinstance(X, Mapping) else ()
        inputs = [name for name in inputs if name not in model.loss_inputs or name in names]
    every = [*dict.fromkeys([r.label for r in requests])]
    needed = [*dict.fromkeys([r.label for r in requests if r.loss.needs_labels])]
    labels = needed or every
    if isinstance(X, Columns):
        X = attrs.evolve(X, labels=_as_labels(X.labels, requests))
        given = _rename_columns(X, inputs, labels)
        named = {n: _matrix(model, n, a) for n, a in given.inputs.items()}
        return _with_second_draws(attrs.evolve(given, inputs=named), model)
    if y is None and isinstance(X, Mapping):
        named = {name: X[name] for name in X if name in inputs} | _as_labels(
            {name: value for name, value in X.items() if name not in inputs}, requests
        )
        X, y, sample_weight = _split_mapping(named, labels, sample_weight)
    if isinstance(y, Mapping):
        y = _as_labels(y, requests)
        # Labels that only metrics read may be missing.
        labels = [*needed, *(name for name in every if name in y and name not in needed)]
    strings = [i.name for i in model.inputs if i.dtype == TensorProto.STRING]
    given = data.as_columns(X, y, sample_weight, inputs=inputs, labels=labels, strings=strings)
    if len(inputs) > 1 and set(inputs) <= set(
        getattr(X, "columns", ())
    ):  # each is a column of a frame
        given = attrs.evolve(
            given, inputs={n: _matrix(model, n, a) for n, a in given.inputs.items()}
        )
    return _with_second_draws(given, model)


def _with_second_draws(columns: Columns, model: Model) -> Columns:
    """The columns, with the rows of the inputs that ``batch_drawn`` draws twice."""
    if not model.drawn_again:
        return columns
    rows = columns.inputs
    again = {own: rows[name] for own, name in model.drawn_again.items() if name in rows}
    return attrs.evolve(columns, inputs={**rows, **again})


def _as_labels(given: Mapping[str, Any], requests: Sequence[LossRequest]) -> dict[str, Any]:
    """A mapping with the names of labels in place of the names of their outputs."""
    labels = {r.label for r in requests}
    names = {alias: r.label for r in requests for alias in reversed(r.names)}
    return {
        name if name in labels or names.get(name, name) in given else names.get(name, name): value
        for name, value in given.items()
    }


def _matrix(model: Model, name: str, array: Array) -> Array:
    """One column of a table in the shape [rows, 1], if the input has it; others are unchanged."""
    shape = model.value(name).shape or () if name in {i.name for i in model.inputs} else ()
    return array.reshape(-1, 1) if array.ndim == 1 and len(shape) == 2 and shape[1] == 1 else array


def _split_mapping(
    given: Mapping[str, Any], labels: Sequence[str], sample_weight: Any
) -> tuple[dict[str, Any], Any, Any]:
    """Split one mapping with all names into inputs, labels and sample weights."""
    inputs = dict(given)
    y = {name: inputs.pop(name) for name in labels if name in inputs}
    usual = [name for name in _LABELS if name in inputs]
    if not y and len(labels) == 1 and usual:
        y[labels[0]] = inputs.pop(usual[0])
    if y and sample_weight is None:
        sample_weight = inputs.pop("sample_weight", None)
    return inputs, y or None, sample_weight


def _rename_columns(columns: Columns, inputs: Sequence[str], labels: Sequence[str]) -> Columns:
    """Columns X and y of files, renamed to the only input and the only label."""
    given, expected = dict(columns.inputs), dict(columns.labels)
    if len(inputs) == 1 and list(given) == ["X"]:
        given = {inputs[0]: given["X"]}
    if len(labels) == 1 and list(expected) == ["y"]:
        expected = {labels[0]: expected["y"]}
    for name in inputs:
        if name not in given:
            raise DataError(f"the data lack the input {name!r}; {suggest(name, given)}")
    renamed = attrs.evolve(columns, inputs=given, labels=expected)
    if not renamed.rows:
        raise DataError("the data are empty: 0 rows")
    return renamed


def load(source: DataSource, *, labeled: bool = True) -> Any:
    """The rows of a data source; without ``labeled``, a file may lack the usual labels."""
    with calling(source, "load"):
        try:
            given = source.load()
        except DataError:
            without = None if labeled else without_usual_labels(source)
            if without is None:
                raise
            given = without.load()
    if not isinstance(given, Columns | Pieces | Batches):
        raise calls.wrong(source, "load", given, "Columns, Pieces or Batches")
    return given


def without_usual_labels(source: DataSource) -> DataSource | None:
    """The same source without labels; None if it has no ``target``, or not that which it has by default."""
    field = attrs.fields_dict(type(source)).get("target") if attrs.has(type(source)) else None
    if field is None or getattr(source, "target", None) != field.default:
        return None
    changes: dict[str, Any] = {"target": {}}
    return attrs.evolve(source, **changes)
