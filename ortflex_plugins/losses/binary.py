"""Losses of two classes: ``hinge``, ``squared_hinge``, ``focal``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, Ops, Tensor, TensorSpec, hyper, number, require_range
from ortflex_plugins.losses.regression import ElementwiseLoss


@attrs.frozen(kw_only=True)
class Hinge(ElementwiseLoss):
    """Hinge loss of raw scores: ``l = max(0, 1 − y·s)``.

    Labels are −1 or 1. Labels and loss values have the shape of the scores, [B, …].

    Raises:
        DataError: the labels have another shape, are outside their range, or are not numbers.

    >>> Hinge().describe()
    {'name': 'hinge'}

    Source: sklearn.metrics.hinge_loss before averaging.
    """

    name: ClassVar[str] = "hinge"
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels other than −1 and 1."""
        negative = np.asarray(labels == -1)
        require_range(self.name, labels, 1, 1, allowed=negative, hint="The classes are -1 and 1.")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        return op.Relu(1 - expected * predicted)


@attrs.frozen(kw_only=True)
class SquaredHinge(Hinge):
    """Squared hinge loss of raw scores: ``l = max(0, 1 − y·s)²``.

    Labels are −1 or 1. Labels and loss values have the shape of the scores, [B, …].

    Raises:
        DataError: the labels have another shape, are outside their range, or are not numbers.

    >>> SquaredHinge().describe()
    {'name': 'squared_hinge'}

    Source: scikit-learn's SGDClassifier(loss="squared_hinge").
    """

    name: ClassVar[str] = "squared_hinge"

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        margin = op.Relu(1 - expected * predicted)
        return margin * margin


@attrs.frozen(kw_only=True)
class Focal(ElementwiseLoss):
    """Focal loss of logits ``s``: ``l = −a·(1 − p)^gamma·log p``.

    Here, ``p`` is the predicted probability of the label: σ(s) for the label 1 and 1 − σ(s) for the
    label 0. The weight ``a`` is ``alpha`` for the label 1 and ``1 − alpha`` for the label 0. Labels and
    loss values have the shape of the logits, [B, …].

    Raises:
        ValueError: ``alpha`` is not in [0, 1], or ``gamma`` is below 1.
        DataError: the labels have another shape, are outside their range, or are not numbers.

    >>> Focal().describe()
    {'name': 'focal', 'alpha': 0.25, 'gamma': 2.0}

    Source: T.-Y. Lin et al., "Focal loss for dense object detection" (2017);
    torchvision.ops.sigmoid_focal_loss.
    """

    name: ClassVar[str] = "focal"
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    alpha: float = hyper(default=0.25, validator=number(ge=0, le=1), help="the weight of class 1")
    gamma: float = hyper(
        default=2.0,
        validator=number(ge=1),
        help="the focusing parameter: larger values reduce the weight of well-classified rows",
    )

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels other than 0 and 1."""
        zeros = np.asarray(labels == 0)
        require_range(self.name, labels, 1, 1, allowed=zeros, hint="The classes are 0 and 1.")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``1 − p`` is σ(−z) and ``−log p`` is log(1 + exp(−z)), with ``z = s`` if y is 1, else ``−s``."""
        score = predicted * (2 * expected - 1)
        entropy = op.Max(-score, 0.0) + op.Log(1 + op.Exp(-op.Abs(score)))
        weight = self.alpha * expected + (1 - self.alpha) * (1 - expected)
        return weight * entropy * op.Sigmoid(-score) ** self.gamma
