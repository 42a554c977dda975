"""The penalty ``l2``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Ops, Penalty, Tensor, hyper, number


@attrs.frozen(kw_only=True)
class L2(Penalty):
    """The sum of squares: ``l2·Σw²``, without the factor ½, so its gradient is ``2·l2·w``.

    It is added once per step, for both reductions. torch's ``weight_decay`` is ``2·l2``.

    Raises:
        ValueError: ``l2`` is negative.

    >>> L2(l2=0.01).describe()
    {'name': 'l2', 'l2': 0.01}

    Source: A. Hoerl and R. Kennard, "Ridge regression" (1970).
    """

    name: ClassVar[str] = "l2"

    l2: float = hyper(default=1e-4, validator=number(ge=0), help="factor of Σw²")

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``l2·w²``."""
        return self.l2 * (weight * weight)

    def gradient(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``2·l2·w``."""
        return (2 * self.l2) * weight
