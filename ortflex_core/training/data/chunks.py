"""Chunks of rows for evaluations and predictions: how many rows at a time, and their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.batches import Batch, totals
from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array

# Rows of a batch: enough for speed, few enough for memory.
_CHUNK = 1024


def chunk_size(problem: Problem, rows: int) -> int:
    """The rows that are evaluated at a time: a fixed batch dimension, or the size of training batches."""
    fixed = [i.shape[0] for i in problem.model.inputs if i.shape and isinstance(i.shape[0], int)]
    if fixed and rows % fixed[0]:
        raise DataError(
            f"the model has a fixed batch dimension of {fixed[0]}, and {rows} rows are not a "
            "multiple of it; pass a multiple of it, or create the Trainer with free_batch=True"
        )
    if any(term.tensors for term in problem.terms):
        return fixed[0] if fixed else problem.batch_size  # pairs of a batch; boxes and anchors
    return fixed[0] if fixed else max(_CHUNK, problem.batch_size)


def slices(
    columns: Mapping[str, Array], rows: int, size: int, denominators: Sequence[float | Array]
) -> list[Batch]:
    """Consecutive rows, ``size`` at a time; views, not copies."""
    out = []
    for start in range(0, rows, size):
        part = {name: array[start : start + size] for name, array in columns.items()}
        count = min(size, rows - start)
        of_part = totals(denominators, count, slice(start, start + size))
        out.append(Batch(part, None, count, of_part))
    return out
