"""The penalty ``l1``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Ops, Penalty, Tensor, hyper, number


@attrs.frozen(kw_only=True)
class L1(Penalty):
    """The sum of absolute values: ``l1·Σ|w|``. The gradient at ``w = 0`` is 0.

    It is added once per step, for both reductions.

    Raises:
        ValueError: ``l1`` is negative.

    >>> L1(l1=0.01).describe()
    {'name': 'l1', 'l1': 0.01}

    Source: R. Tibshirani, "Regression shrinkage and selection via the lasso" (1996).
    """

    name: ClassVar[str] = "l1"

    l1: float = hyper(default=1e-4, validator=number(ge=0), help="factor of Σ|w|")

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``l1·|w|``."""
        return self.l1 * op.Abs(weight)

    def gradient(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``l1·sign(w)``."""
        return self.l1 * op.Sign(weight)
