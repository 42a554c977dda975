"""The loss ``poisson``."""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np

from ortflex_core.data import float_labels, require_range
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import Array, TensorSpec


@attrs.frozen(kw_only=True)
class Poisson(Loss):
    """Poisson's negative log-likelihood of log-rates ``s``: ``exp(s) − y·s``.

    Labels are counts ``y ≥ 0`` of the scores' shape [B, …]. In float32 a score above 88 is infinite.

    Raises:
        DataError: labels of another shape, outside their range, or not numbers.

    >>> Poisson().describe()["name"]
    'poisson'

    Source: torch.nn.PoissonNLLLoss(log_input=True) before its reduction.
    """

    name: ClassVar[str] = "poisson"

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the prediction's type and shape."""
        return float_labels(self.name, predicted, given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels outside [0, ∞)."""
        allowed = np.zeros(labels.shape, dtype=bool)
        require_range(self.name, labels, 0, None, allowed=allowed, hint="They are counts.")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""
        return op.Exp(predicted) - expected * predicted
