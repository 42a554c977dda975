"""The loss ``focal``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core.component import hyper, number
from ortflex_core.data import float_labels, require_range
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import Array, TensorSpec


@attrs.frozen(kw_only=True)
class Focal(Loss):
    """Focal loss of raw scores: ``l·(1 − p)^gamma``, ``l`` the log loss and ``p`` the label's probability.

    Labels ``y`` are 0 or 1 of the scores' shape [B, …]; the loss of a 1 is weighted by ``alpha``,
    that of a 0 by ``1 − alpha``.

    Raises:
        ValueError: ``alpha`` is not in [0, 1], or ``gamma`` is below 1.
        DataError: labels of another shape, outside their range, or not numbers.

    >>> Focal().describe()["name"]
    'focal'

    Source: T.-Y. Lin et al., "Focal loss for dense object detection" (2017);
    torchvision.ops.sigmoid_focal_loss.
    """

    name: ClassVar[str] = "focal"
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    alpha: float = hyper(default=0.25, validator=number(ge=0, le=1), help="the weight of class 1")
    gamma: float = hyper(
        default=2.0,
        validator=number(ge=1),
        help="the larger it is, the less well-classified rows count",
    )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the prediction's type and shape."""
        return float_labels(self.name, predicted, given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels outside 0 and 1."""
        allowed = np.asarray(labels == 0)
        require_range(self.name, labels, 1, 1, allowed=allowed, hint="The classes are 0 and 1.")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``(1 − p)`` is σ(−z) and ``l`` is log(1 + exp(−z)), with ``z = s`` where y is 1, else ``−s``."""
        score = predicted * (2 * expected - 1)
        entropy = op.Max(-score, 0.0) + op.Log(1 + op.Exp(-op.Abs(score)))
        share = self.alpha * expected + (1 - self.alpha) * (1 - expected)
        return share * entropy * op.Sigmoid(-score) ** self.gamma
