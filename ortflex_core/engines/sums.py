"""The costs of an epoch, added step by step."""

from __future__ import annotations

import math

import numpy as np

from ortflex_core.types import Array


class Sums:
    """Loss and penalty of an epoch, weighted by rows."""

    __slots__ = ("last", "loss", "penalty", "rows", "steps")

    def __init__(
        self, steps: int = 0, rows: int = 0, loss: float = 0.0, penalty: float = 0.0
    ) -> None:
        self.steps, self.rows, self.loss, self.penalty = steps, rows, loss, penalty
        self.last = (math.nan, math.nan)

    def add_one(self, rows: int, loss: float, penalty: float) -> None:
        """Add one step, as ``add`` does, without arrays."""
        self.steps += 1
        self.rows += rows
        self.loss += rows * loss
        self.penalty += rows * penalty
        self.last = (loss, penalty)

    def add(self, rows: Array, costs: Array) -> None:
        """Add steps: their rows [n], and their losses and penalties [n, 2]."""
        self.steps += len(rows)
        self.rows += int(rows.sum())
        # Added one by one, so that the sum does not depend on the number per call.
        before = np.array([[self.loss, self.penalty]])
        sums = np.cumsum(np.concatenate([before, rows[:, None] * costs]), axis=0)
        self.loss, self.penalty = map(float, sums[-1])
        self.last = (float(costs[-1, 0]), float(costs[-1, 1]))
