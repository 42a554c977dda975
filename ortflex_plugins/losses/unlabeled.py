"""Losses of logits without labels: ``entropy``, ``consistency``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from ortflex_core import Loss, Ops, Tensor, TensorSpec, one_of, setting
from ortflex_plugins.losses._classes import Specs, Tensors, class_labels


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

    needs_labels = False

    axis: int = setting(default=1, validator=one_of(1, -1), help="the axis of the classes: 1 or -1")

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Class indices or fractions, for metrics."""
        return class_labels(self.name, predicted, given, self.axis)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor | None) -> Tensor:
        """``−Σ_c p_c · log p_c``."""
        logs = op.LogSoftmax(predicted, axis=self.axis)
        return -op.ReduceSum(op.Exp(logs) * logs, axes=[self.axis], keepdims=0)


@attrs.frozen(kw_only=True)
class Consistency(Loss[Tensors, Specs]):
    """Squared difference between two predictions: ``l = 1/C · Σ_c (softmax(a)_c − softmax(b)_c)²``.

    ``a`` and ``b`` are the logits [B, C, …] of one model for two random augmentations of the same rows.
    The rows are augmented by callbacks with the hook ``batch_drawn``, which is called twice for each
    batch, with different random numbers. The Dropout masks of the two predictions also differ. No labels
    are needed. The softmax is taken along ``axis`` (1, or -1 for logits [B, …, C]), and the loss values
    have the shape [B, …]. During evaluation, nothing is augmented, so the loss is 0.

    For semi-supervised training, combine this loss with ``softmax_cross_entropy``, and give unlabeled
    rows a sample weight of 0 in that loss. On its own, ``consistency`` has a trivial minimum: equal
    logits for all rows.

    Raises:
        DataError: the scores have no axis of two or more classes.

    >>> Consistency().needs_labels
    False

    Source: S. Laine and T. Aila, "Temporal ensembling for semi-supervised learning", ICLR 2017, the
    Π-model; with ``target``, Q. Xie et al., "Unsupervised data augmentation for consistency training",
    2020.
    """

    name: ClassVar[str] = "consistency"
    aliases: ClassVar[tuple[str, ...]] = ("pi_model", "consistency_regularization")
    scores: ClassVar[Literal["any", "raw"]] = "raw"
    tensors: ClassVar[tuple[str, ...]] = ("scores", "second")
    one_model: ClassVar[bool] = True
    draws: ClassVar[tuple[str, ...]] = ("second",)
    needs_labels = False

    axis: int = setting(default=1, validator=one_of(1, -1), help="the axis of the classes: 1 or -1")
    target: bool = setting(
        default=False,
        help="whether the second prediction is treated as a constant target, without a gradient",
    )

    def label(self, predicted: Specs, given: TensorSpec | None) -> TensorSpec:
        """Class indices or fractions, for metrics."""
        return class_labels(self.name, predicted["scores"], given, self.axis)

    def per_sample(self, op: Ops, predicted: Tensors, expected: Tensor | None) -> Tensor:
        """The mean over the classes of the squared differences of the probabilities."""
        first, second = (
            op.Softmax(predicted[role], axis=self.axis) for role in ("scores", "second")
        )
        if self.target:
            second = op.stop_gradient(second)
        error = first - second
        return op.ReduceMean(error * error, axes=[self.axis], keepdims=0)
