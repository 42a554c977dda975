"""Diagnosis of a compiled step that fails on data with the right names and types."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ortflex_core.compiler.graph.ops import FLOATS
from ortflex_core.compiler.problem.description import fed
from ortflex_core.compiler.problem.problem import LossTerm, Problem
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.error_reasons import error_reason
from ortflex_core.kernel.errors import DataError, GraphError, MissingKernel
from ortflex_core.kernel.protocols.backend import Engine
from ortflex_core.kernel.types import Array, Shape, shape_text


def explained(
    error: GraphError,
    problem: Problem,
    engine: Engine,
    batch: Batch,
    given: Mapping[str, Array],
) -> Exception:
    """The failure of a step in terms of the model and the data; ``error`` if there is no explanation.

    ``given`` are the inputs as the user gave them; derived columns stand in for them in the batch.
    """
    if isinstance(error, MissingKernel):
        return error
    try:
        check_rows(problem, engine, batch)
    except DataError as better:
        return better
    except GraphError as same:
        return unfit(same, problem, given)
    return error


def unfit(error: GraphError, problem: Problem, given: Mapping[str, Array]) -> DataError:
    """The failure of a graph of the model on the inputs that the user gave."""
    columns = fed(problem.model.inputs, {n: array.shape for n, array in given.items()})
    why = error if error.__cause__ is None else error_reason(error.__cause__)
    return DataError(f"the model cannot run on {columns}: {why}")


def check_rows(problem: Problem, engine: Engine, batch: Batch) -> None:
    """Run the model on a batch and check that the tensors of the losses have a row for every label.

    Raises:
        DataError: a tensor has another number of rows, which a broadcast would hide; it names both
            shapes.
        GraphError: the model does not run on this batch.
    """
    predictions = engine.predict(batch, problem.predicted)
    for term in problem.terms:
        name = term.predicted.name
        got, declared = predictions[name].shape, shape_text(problem.model.value(name).shape)
        if got[:1] != (batch.size,):
            raise DataError(
                f"{name!r}, which the {term.loss.name} loss reads, has shape {shape_text(got)} "
                f"for a batch of {batch.size} rows (the model says {declared}): its first "
                "dimension is not the batch dimension. Attach the loss to a tensor with one row "
                f"per sample: loss={{'name': …, 'predicted': …}}"
            )
        if term.label is None:
            continue
        label = batch.shape(term.label.name)
        if term.label.shape == term.predicted.shape and label != got:
            raise DataError(
                f"{name!r}, which the {term.loss.name} loss reads, has shape {shape_text(got)} "
                f"for this batch (the model says {declared}), its labels {term.label_key!r} have "
                f"{shape_text(label)}; expected equal shapes"
            )
        _check_positions(term, got, label)


def _check_positions(term: LossTerm, got: Shape, label: Shape) -> None:
    """Refuse class indices of another number of positions than the scores have.

    Raises:
        DataError: names both shapes.
    """
    seen, wanted = term.predicted.shape, None if term.label is None else term.label.shape
    if seen is None or wanted is None or len(label) != len(got) - 1:
        return
    axes = [k for k in range(1, len(seen)) if wanted == (*seen[:k], *seen[k + 1 :])]
    fitting = [(*got[:k], *got[k + 1 :]) for k in axes]
    if fitting and label not in fitting:
        raise DataError(
            f"the labels {term.label_key!r} have the shape {shape_text(label)}, but "
            f"{term.predicted.name!r}, which the {term.loss.name} loss reads, has {shape_text(got)}: "
            "expected labels of the shape "
            f"{shape_text(fitting[0])}. For the next token the loss causal_lm shifts the labels itself; "
            "shorter labels are filled with ignore_index (-100)"
        )


def broken_weight(problem: Problem, state: Mapping[str, Array]) -> str:
    """The first weight that is not finite: trained weights first, then constants; "" if all are finite.

    Constants may be infinite, as in masks, but not NaN.
    """
    for name in problem.parameters:
        if text := _not_numbers(state[name], np.isfinite(state[name])):
            return f"the weight {name!r} {text}"
    for name, spec in problem.model.initializers.items():
        if name in problem.parameters or spec.dtype not in FLOATS:
            continue
        array = problem.model.initializer(name)
        if text := _not_numbers(array, ~np.isnan(array)):
            return f"the weight {name!r}, which is not trained, {text}"
    return ""


def _not_numbers(array: Array, good: Array) -> str:
    count = int(good.size - np.count_nonzero(good))
    kind = "NaN" if np.isnan(array).any() else "infinities"
    return f"has {kind} ({count} of {good.size} values)" if count else ""


def batch_dim_uncertain(problem: Problem) -> bool:
    """Whether a predicted tensor has a first dimension that no input has."""
    batches = {i.shape[0] for i in problem.model.inputs if i.shape} | {"batch"}
    for name in problem.predicted:
        shape = problem.model.value(name).shape
        # Inference calls unknown dimensions unk__0, unk__1, …: they may be the batch.
        first = shape[0] if shape else None
        if first is not None and first not in batches and not str(first).startswith("unk__"):
            return True
    return False
