"""The optimizer ``sgd``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from ortflex_core.ops import Ops, Tensor
from ortflex_core.protocols import Optimizer


@attrs.frozen(kw_only=True)
class Sgd(Optimizer):
    """Stochastic gradient descent: ``w ← w − rate·g``; default rate 0.001.

    >>> Sgd().describe()
    {'name': 'sgd'}

    Source: H. Robbins and S. Monro, "A stochastic approximation method" (1951); torch.optim.SGD.
    """

    name: ClassVar[str] = "sgd"
    default_rate: ClassVar[float] = 1e-3

    def update(
        self,
        op: Ops,
        weight: Tensor,
        gradient: Tensor,
        rate: Any,
        step: Any,
        slots: Mapping[str, Tensor],
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """``w − rate·g``."""
        return weight - rate * gradient, {}
