"""The constraint ``non_negative``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Constraint, Ops, Tensor


@attrs.frozen(kw_only=True)
class NonNegative(Constraint):
    """Sets negative elements to zero: ``w ← max(w, 0)``.

    >>> NonNegative().describe()
    {'name': 'non_negative'}

    Source: the projection step of projected gradient descent; ``keras.constraints.NonNeg``.
    """

    name: ClassVar[str] = "non_negative"

    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """``max(w, 0)``."""
        return op.Relu(weight)
