"""Diagnosis of a compiled step that fails on data with the right names and types."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import attrs
import numpy as np

from ortflex_core.compiler.graph.ops import FLOATS
from ortflex_core.compiler.problem.description import fed
from ortflex_core.compiler.problem.problem import LossTerm, Problem
from ortflex_core.kernel.batches import Batch, Epoch, Source
from ortflex_core.kernel.errors import DataError, GraphError, MissingKernel, error_reason
from ortflex_core.kernel.types import Array, Shape, shape_text

Predict = Callable[[Batch, Sequence[str]], Mapping[str, Array]]
"""Computes tensors of the model for a batch."""
Shapes = tuple[tuple[str, Shape], ...]
"""The shapes of columns without their rows, by name."""


@attrs.define
class Seen:
    """The batches that a graph got last: if it fails, the error names the batch, and what does not fit.

    Args:
        problem: its losses and the inputs of its model.
        predict: computes the tensors of the losses.
        first: the inputs of the first batch, as the user gave them.
        numbered: whether the user made the batches, so that the error has the number of the batch.
        most: the number of groups of batches from which one may fail.
        own: the batches of a group that this process computes.
        fitting: the shapes of columns that were compared with the model's results, and fit.
    """

    problem: Problem
    predict: Predict
    first: Mapping[str, Array]
    numbered: bool = False
    most: int = 1
    own: slice = slice(None)
    fitting: set[Shapes] = attrs.field(factory=set)
    _recent: deque[tuple[int, Sequence[Batch]]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._recent = deque(maxlen=self.most)

    def source(self, source: Source) -> Source:
        """The source; its batches are noted when they are drawn."""
        return _Noted(source, self)

    def batches(self, drawn: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, each of which is noted."""
        for number, batch in enumerate(drawn):
            self.note(number, (batch,))
            yield batch

    def note(self, number: int, group: Sequence[Batch]) -> None:
        """Note a group of batches, the first of which has the number."""
        begun = bool(self._recent)
        self._recent.append((number, group))
        if begun and not self.numbered:
            return
        for k, batch in self._own(number, group):
            shapes = _uncertain(self.problem, batch)
            if shapes and shapes not in self.fitting:
                if (why := self._reason(batch)) is not None:
                    raise self._named(k, why) from why
                self.fitting.add(shapes)
            if not self.numbered:
                return  # all rows have one shape

    def explained(self, error: GraphError) -> Exception:
        """The failure in terms of the model and the data; ``error`` if there is no explanation."""
        if isinstance(error, MissingKernel):
            return error
        for number, group in self._recent:
            for k, batch in self._own(number, group):
                if (why := self._reason(batch)) is not None:
                    return self._named(k, why)
        return error

    def _own(self, number: int, group: Sequence[Batch]) -> Iterator[tuple[int, Batch]]:
        return ((number + k, group[k]) for k in range(len(group))[self.own])

    def _reason(self, batch: Batch) -> DataError | None:
        """Why the model or a loss cannot read a batch; None if they can."""
        try:
            check_rows(self.problem, self.predict, batch)
        except DataError as better:
            return better
        except GraphError as same:
            return unfit(same, self.problem, self._shapes(batch), self.first)
        return None

    def _shapes(self, batch: Batch) -> dict[str, Shape]:
        """The shapes of the inputs as the user gave them; derived columns stand in for them."""
        given = getattr(batch.columns, "given", batch)
        shapes = {n: array.shape for n, array in self.first.items()}
        return shapes | {n: given.shape(n) for n in shapes if n in given.columns}

    def _named(self, number: int, why: DataError) -> DataError:
        return DataError(f"batch {number}: {why}") if self.numbered else why


class _Noted:
    """A source whose batches are noted when they are drawn; all other calls go to the inner source."""

    def __init__(self, source: Source, seen: Seen) -> None:
        self._source, self._seen = source, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batches(self, epoch: Epoch) -> Iterator[Sequence[Batch]]:
        drawn, number = self._source.batches(epoch), epoch.start
        with closing(drawn):  # type: ignore[type-var]  # generators, all of them
            for group in drawn:
                self._seen.note(number, group)
                number += len(group)
                yield group


_FIXED_ROWS = (
    ". If the exporter wrote the number of rows of its example into the graph, use that number as "
    "batch_size, with drop_last=True, or export the model again with a dynamic batch"
)


def unfit(
    error: GraphError, problem: Problem, shapes: Mapping[str, Shape], first: Mapping[str, Array]
) -> DataError:
    """The failure of a graph of the model on inputs of these shapes; ``first`` is the first batch."""
    columns = fed(problem.model.inputs, shapes)
    why = str(error) if error.__cause__ is None else error_reason(error.__cause__)
    # The number of rows may differ between batches.
    other = [n for n, array in first.items() if n in shapes and array.shape[1:] != shapes[n][1:]]
    before = ", ".join(f"{n} {shape_text(first[n].shape)}" for n in other)
    text = f"the model cannot run on {columns}: {why}"
    if other:
        return DataError(f"{text}; the first batch had {before}")
    sizes = {str(shape[0]) for shape in shapes.values() if shape}
    known = [spec.shape[1:] for spec in problem.model.inputs if spec.shape is not None]
    fixed = any(all(isinstance(d, int) for d in shape) for shape in known)
    named = fixed and not sizes.isdisjoint(re.findall(r"\d+", why))
    return DataError(f"{text}{_FIXED_ROWS}" if named else text)


def _uncertain(problem: Problem, batch: Batch) -> Shapes:
    """The shapes of a batch that a loss may broadcast; empty if it cannot.

    The size of an axis is certain if an input has an axis of the same name. An axis of any other name is
    as long as the model makes it, for instance 1, which a loss would broadcast to the labels.
    """
    labels = [(t, t.label) for t in problem.terms if t.label is not None]
    if not any(isinstance(d, str) for _, label in labels for d in (label.shape or ())[1:]):
        return ()
    # Derived columns are computed when they are read.
    given = getattr(batch.columns, "given", batch)
    inputs = [i for i in problem.model.inputs if i.shape and i.name in given.columns]
    shapes = {i.name: given.shape(i.name)[1:] for i in inputs}
    sizes = {
        d: n for i in inputs for d, n in zip((i.shape or ())[1:], shapes[i.name], strict=False)
    }
    uncertain = False
    for term, label in labels:
        same = label.shape == term.predicted.shape
        shapes[label.name] = got = given.shape(label.name)[1:]
        uncertain |= any(
            isinstance(d, str) and (n != sizes.get(d) if same else n == 1)
            for d, n in zip((label.shape or ())[1:], got, strict=False)
        )
    return tuple(sorted(shapes.items())) if uncertain else ()


def check_rows(problem: Problem, predict: Predict, batch: Batch) -> None:
    """Run the model on a batch and check that the tensors of the losses have a row for every label."""
    predictions = predict(batch, problem.predicted)
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
    """Refuse class indices of another number of positions than the scores have."""
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
