"""The loss ``entropy``: confident predictions on rows without labels."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from ortflex_core import Loss, Ops, Tensor, TensorSpec, one_of, setting
from ortflex_plugins.losses._classes import class_labels


@attrs.frozen(kw_only=True)
class Entropy(Loss):
    """Entropy of the softmax of logits ``s`` of shape [B, C, …]: ``l = −Σ_c p_c · log p_c``.

    The softmax p is taken along ``axis`` (1, or -1 for logits [B, …, C]). The loss values have the shape
    [B, …] and lie between 0 and log C. No labels are needed.

    The loss moves the decision boundaries away from unlabeled data. For semi-supervised training,
    combine it with ``softmax_cross_entropy`` and give it a small ``factor``. On its own, it has a
    trivial minimum: one class for all rows.

    Raises:
        DataError: the scores have no axis of two or more classes.

    >>> Entropy().needs_labels
    False

    Source: Y. Grandvalet and Y. Bengio, "Semi-supervised learning by entropy minimization", NIPS 2004.
    """

    name: ClassVar[str] = "entropy"
    aliases: ClassVar[tuple[str, ...]] = ("entropy_minimization", "conditional_entropy")
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    axis: int = setting(default=1, validator=one_of(1, -1), help="the axis of the classes: 1 or -1")

    @property
    def needs_labels(self) -> bool:
        """No labels."""
        return False

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Class indices or fractions, for metrics."""
        return class_labels(self.name, predicted, given, self.axis)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor | None) -> Tensor:
        """``−Σ_c p_c · log p_c``."""
        logs = op.LogSoftmax(predicted, axis=self.axis)
        return -op.ReduceSum(op.Exp(logs) * logs, axes=[self.axis], keepdims=0)
