"""Conversion of columns for the graphs: types, shapes, sample weights, denominators.

This is done once per array, not in every step.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.problem.problem import LossTerm, Problem
from ortflex_core.compiler.programs import stages
from ortflex_core.compiler.runtime.session import run_once
from ortflex_core.kernel.batches import Batch, totals
from ortflex_core.kernel.engine_protocols import Device
from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array, TensorSpec
from ortflex_core.training.data.columns import Columns, fit_to
from ortflex_core.training.data.derived import Derivation


@attrs.frozen
class Preparation:
    """Converts columns to the form that the graphs of a problem read."""

    problem: Problem
    device: Device
    check_finite: bool = True
    derivation: Derivation | None = None
    """Computes the columns that the graphs read, if a prefix of the model is not in the graphs."""
    _masks: dict[str, Program | None] = attrs.field(init=False, factory=dict, eq=False)
    """The program of the contributions of rows, by the prefix of a loss term; traced once."""

    def columns(self, given: Columns) -> dict[str, Array]:
        """Every column in the type and shape of the graph input it feeds."""
        out = self.inputs(given)
        used = {t.weight_key for t in self.problem.terms if t.weight is not None}
        if ignored := sorted(set(given.weights) - used):
            raise DataError(
                f"these data have sample weights {ignored[0]!r}, but the first batch had none; "
                "pass them with every batch or with none"
            )
        for term in self.problem.terms:
            if term.label is not None and term.label_key not in given.labels:
                raise DataError(
                    f"these data lack the labels {term.label_key!r} of the {term.loss.name} loss"
                )
            if term.label is not None:
                array = given.labels[term.label_key]
                what = f"y[{term.label_key!r}]" if len(self.problem.terms) > 1 else "y"
                fitted = fit_to(array, term.label, what, check_finite=self.check_finite)
                calls.check_labels(term.loss, term.seen, fitted)
                out[term.label.name] = fitted
            for role, spec in term.tensors:
                if role in term.loss.columns and spec.name in out:
                    calls.check_column(term.loss, term.seen, role, out[spec.name])
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
                out[spec.name] = fit_to(array, spec, what, check_finite=self.check_finite)
        return out

    def _weight(self, given: Columns, key: str, spec: TensorSpec) -> Array:
        if key not in given.weights:
            raise DataError(f"these data lack the sample weights {key!r} that the first batch had")
        array = given.weights[key]
        if array.ndim == 1:
            array = array.reshape(-1, *([1] * (len(spec.shape or ()) - 1)))
        fitted = fit_to(array, spec, "sample_weight", check_finite=True)
        if fitted.size and fitted.min() < 0:
            row = int(np.argwhere(fitted < 0)[0][0])
            raise DataError(f"sample_weight must be >= 0, but row {row} has {fitted[row].min():g}")
        if fitted.size and not fitted.any() and array.any():
            raise _too_small("sample_weight", float(array.max()), 0, float(array.max()))
        return fitted

    def denominators(self, columns: Mapping[str, Array]) -> list[float | Array]:
        """For each loss term, the contribution of a row to the denominator of the mean.

        One number if it is equal for all rows, else one per row: Σ w·mask over the row's elements.
        """
        return [self._denominator(term, columns) for term in self.problem.terms]

    def _denominator(self, term: LossTerm, columns: Mapping[str, Array]) -> float | Array:
        if term.prefix not in self._masks:
            self._masks[term.prefix] = stages.mask_program(self.problem, term)
        program = self._masks[term.prefix]
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
        """The contributions of rows to a denominator; refused if the reciprocal overflows float32."""
        positive = rows[rows > 0]
        least = float(positive.min()) if positive.size else 1.0
        if least < _LEAST and self.problem.reduction == "mean":
            what = "sample_weight"
            if term.weight is None:
                what = f"the weights of the {term.loss.name} loss"
            raise _too_small(what, least, int(np.argmax(rows == least)), float(rows.max()))
        return rows

    def _elements(self, term: LossTerm, columns: Mapping[str, Array]) -> int:
        """The number of loss values in a row; symbolic sizes are taken from the labels."""
        sizes: dict[int | str | None, int] = {}
        if term.label is not None:
            label = columns[term.label.name]
            sizes = dict(zip(term.label.shape or (), label.shape, strict=False))
        elements = 1
        for size in term.samples[1:]:
            known = size if isinstance(size, int) else sizes.get(size)
            if known is None:
                raise DataError(
                    f"the size {size!r} of the values of the {term.loss.name} loss is known "
                    "neither from the model nor from the labels; use reduction='sum'"
                )
            elements *= known
        return elements

    def batch(self, given: Columns) -> Batch:
        """All rows of the columns as one batch."""
        columns = self.columns(given)
        of_all = totals(self.denominators(columns), given.rows)
        return self.derived(Batch(columns, None, given.rows, of_all))

    def derived(self, batch: Batch) -> Batch:
        """A batch of the model's inputs with the columns that the graphs read."""
        return batch if self.derivation is None else self.derivation.batch(batch)


_LEAST = 1 / float(np.finfo(np.float32).max)


def _too_small(what: str, weight: float, row: int, largest: float) -> DataError:
    return DataError(
        f"{what}: row {row} has the weight {weight:.3g}, whose reciprocal is too large for float32 (the "
        f"smallest weight is {_LEAST:.3g}). The largest is {largest:.3g}; multiply all weights "
        "by a constant, which does not change the mean, or set the weights of rows to be ignored to 0"
    )
