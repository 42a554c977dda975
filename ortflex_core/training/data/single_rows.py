"""Batches of a single row, on which a BatchNormalization cannot train.

The variance of one value is 0, and its unbiased estimate does not exist; so such a step would divide
by the root of epsilon, and would spoil the running statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from ortflex_core.compiler.model.training_mode import normalized_by_batch
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.batches import Batch, Epoch, Source
from ortflex_core.kernel.errors import DataError


def check_source(problem: Problem, source: Source, batch_size: int) -> None:
    """Refuse data of which it is known that a batch has a single row."""
    if source.rows is None:
        return
    size = min(batch_size, source.rows)
    last = source.rows % size
    if size == 1:
        how = "there is one row" if source.rows == 1 else "batch_size is 1"
        _refuse(problem, how, "use a larger batch_size and drop_last=True")
    elif last == 1:
        _refuse(
            problem,
            f"{source.rows} rows in batches of {size} leave a last batch of one row",
            f"drop_last=True leaves it out, or choose another batch_size, such as {size + 1}"
            if source.rows % (size + 1) != 1
            else "drop_last=True leaves it out",
        )


def check_batch(problem: Problem, rows: int, predicted: Sequence[str] | None = None) -> None:
    """Refuse a batch of one row. ``predicted`` are the tensors of the losses, by default the problem's."""
    if rows == 1:
        _refuse(
            problem,
            "a batch has one row",
            "pass at least two rows, or leave it out (drop_last)",
            predicted,
        )


def watched(problem: Problem, source: Source) -> Source:
    """The source, with every batch checked if their sizes are not known before training."""
    return source if _node(problem) is None else _Watched(source, problem)


class _Watched:
    """A source whose batches are checked when they are drawn; all other calls go to the inner source."""

    def __init__(self, source: Source, problem: Problem) -> None:
        self._source, self._problem = source, problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batches(self, epoch: Epoch) -> Iterator[Sequence[Batch]]:
        drawn = self._source.batches(epoch)
        with closing(drawn):  # type: ignore[type-var]  # generators, all of them
            for group in drawn:
                check_batch(self._problem, group[0].size)
                yield group


def _refuse(problem: Problem, how: str, way: str, predicted: Sequence[str] | None = None) -> None:
    if (node := _node(problem, predicted)) is not None:
        raise DataError(
            f"{how}, but the BatchNormalization {node!r} needs more than one value per channel when "
            f"training; {way}. batch_norm='freeze' uses the statistics in the file"
        )


def _node(problem: Problem, predicted: Sequence[str] | None = None) -> str | None:
    """A node that normalizes with the statistics of the batch, and has one value per row and channel."""
    for node in normalized_by_batch(problem, predicted or problem.predicted):
        shape = problem.model.value(node.input[0]).shape
        if shape and shape[0] == "batch" and all(size == 1 for size in shape[2:]):
            return node.name or node.output[0]
    return None
