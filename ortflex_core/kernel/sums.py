"""The costs of an epoch, added step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Sums:
    """Loss and penalty of an epoch, weighted by rows."""

    __slots__ = ("last", "loss", "penalty", "rows", "steps")

    def __init__(
        self, steps: int = 0, rows: int = 0, loss: float = 0.0, penalty: float = 0.0
    ) -> None:
        self.steps, self.rows, self.loss, self.penalty = steps, rows, loss, penalty
        self.last = (math.nan, math.nan)

    def add(self, rows: Sequence[int], costs: Sequence[tuple[float, float]]) -> None:
        """Add steps: the rows of each, and its loss and penalty."""
        # One by one, so that the sums do not depend on the number of steps per call.
        losses, penalties = self.loss, self.penalty
        for count, (loss, penalty) in zip(rows, costs, strict=True):
            losses += count * float(loss)
            penalties += count * float(penalty)
        self.loss, self.penalty = losses, penalties
        self.last = (float(costs[-1][0]), float(costs[-1][1]))
        self.rows += sum(rows)
        self.steps += len(costs)
