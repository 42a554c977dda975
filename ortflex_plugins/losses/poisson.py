"""The loss ``poisson``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Array, Ops, Tensor, TensorSpec, require_range
from ortflex_plugins.losses._elementwise import ElementwiseLoss


@attrs.frozen(kw_only=True)
class Poisson(ElementwiseLoss):
    """Negative log-likelihood of counts ``y`` for log-rates ``s``: ``l = exp(s) − y·s``.

    Labels ``y ≥ 0`` and values have the shape of the scores, [B, …]. In float32, ``exp(s)`` is infinite
    for scores above 88.

    Raises:
        DataError: the labels have another shape, are outside their range, or are not numbers.

    >>> Poisson().describe()
    {'name': 'poisson'}

    Source: torch.nn.PoissonNLLLoss(log_input=True) before its reduction.
    """

    name: ClassVar[str] = "poisson"

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels outside [0, ∞)."""
        require_range(self.name, labels, 0, None, hint="They are counts.")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""
        return op.Exp(predicted) - expected * predicted
