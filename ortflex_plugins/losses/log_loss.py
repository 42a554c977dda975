"""The loss ``log_loss``: binary and multi-label classification."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    Tensor,
    TensorSpec,
    float_labels,
    float_scores,
    integer_labels,
    number,
    one_of,
    require_range,
    setting,
)
from ortflex_plugins.losses._classes import BALANCED, balanced, class_weight_field, known_weights


@attrs.frozen(kw_only=True)
class LogLoss(Loss):
    """Binary cross-entropy, numerically stable for all logits.

    With ``on="scores"``, predictions are logits ``s`` of shape [B], [B, 1] or [B, k] (k labels per
    row). Labels ``y ∈ [0, 1]`` and loss values have the same shape, and
    ``l = max(s, 0) − s·y + log(1 + exp(−|s|))``.

    With ``on="probabilities"``, predictions are probabilities ``p`` [B, 2], one column per class, and
    labels are class indices ``y ∈ {0, 1}``. The loss values have the shape [B], and
    ``l = −log(clip(p_y, eps, 1 − eps))``. The gradient of clipped probabilities is 0, so use the logits
    instead if the graph contains them.

    With ``label_smoothing`` ε and ``class_weight`` (w₀, w₁), ``l = −q₁·log p₁ − q₀·log p₀``, where
    ``q₁ = w₁·((1 − ε)·y + ½ε)``, ``q₀ = w₀·((1 − ε)·(1 − y) + ½ε)``, and p₁ and p₀ are the predicted
    probabilities of the classes 1 and 0. In the mean, each label then has the weight
    ``w₁·y + w₀·(1 − y)``. This loss equals ``softmax_cross_entropy`` with the logits (0, s).

    ``class_weight="balanced"`` sets the weights ``w_c = n / (2·n_c)``, where n is the number of
    training labels and n_c is the number of training labels of class c.

    Raises:
        ValueError: ``on`` has another value, ``eps`` is not in (0, ½), ``label_smoothing`` is not
            in [0, 1], or ``class_weight`` is not two numbers >= 0.
        DataError: the labels have another type or shape, or are outside their range.

    >>> LogLoss(on="probabilities").eps
    1e-07

    Source: torch.nn.BCEWithLogitsLoss and sklearn.metrics.log_loss, before averaging; label_smoothing
    and class_weight as in torch.nn.CrossEntropyLoss.
    """

    name: ClassVar[str] = "log_loss"
    aliases: ClassVar[tuple[str, ...]] = (
        "bce",
        "binary_crossentropy",
        "binary_cross_entropy",
        "bce_with_logits",
        "binary_cross_entropy_with_logits",
    )

    on: Literal["scores", "probabilities"] = setting(
        default="scores",
        validator=one_of("scores", "probabilities"),
        help="the output of the model: logits or probabilities",
    )
    eps: float = setting(
        default=1e-7,
        validator=number(gt=0, lt=0.5),
        help="the smallest probability after clipping; the largest is 1 − eps",
    )
    label_smoothing: float = setting(
        default=0.0,
        validator=number(ge=0, le=1),
        help="the fraction of a label that is distributed equally between both classes",
    )
    class_weight: tuple[float, ...] | Literal["balanced"] | None = class_weight_field()
    counted: ClassVar[tuple[str, ...]] = ("class_weight",)

    @class_weight.validator
    def _check_two(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and value != BALANCED and len(value) != 2:
            raise ValueError(
                "LogLoss.class_weight must be two numbers, for the classes 0 and 1, got "
                f"{tuple(value)!r}"
            )

    @property
    def scores(self) -> Literal["any", "raw"]:  # type: ignore[override]  # depends on a field here
        """Raw, unless the prediction is probabilities."""
        return "raw" if self.on == "scores" else "any"

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the scores' type and shape, or class indices [B] for two probabilities."""
        shape = predicted.shape
        if self.on == "scores":
            two_columns = shape is not None and len(shape) == 2 and shape[1] == 2
            if two_columns and given is not None and given.shape and len(given.shape) == 1:
                raise DataError(
                    f"log_loss: {predicted} has two columns and the labels {given} have none. "
                    "For probabilities of two classes use log_loss with on='probabilities', for "
                    "scores of two classes softmax_cross_entropy"
                )
            return float_labels(self.name, predicted, given)
        float_scores(self.name, predicted)
        if shape is None or len(shape) != 2 or (isinstance(shape[1], int) and shape[1] != 2):
            raise DataError(
                f"log_loss with on='probabilities' expects two columns [B, 2], got {predicted}; "
                "for other predictions use on='scores' or softmax_cross_entropy"
            )
        given = given or TensorSpec("expected", TensorProto.INT64, shape[:1])
        return integer_labels(self.name, shape[:1], given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels outside [0, 1]."""
        hint = "Other class indices or names are encoded by classes=[negative, positive]."
        require_range(self.name, labels, 0, 1, hint=hint)

    def fitted(self, predicted: TensorSpec, labels: Array) -> LogLoss:
        """With ``class_weight="balanced"``, the weights n / (2 · n_c) of the labels 0 and 1."""
        if self.class_weight != BALANCED:
            return self
        positive = labels.sum(dtype=np.float64)
        counts = np.asarray([labels.size - positive, positive])
        return attrs.evolve(self, class_weight=balanced(self.name, counts))

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula, in which exp gets no positive number."""
        if self.on == "scores":
            logarithm = op.Log(1 + op.Exp(-op.Abs(predicted)))
            if self._plain:
                return op.Max(predicted, 0.0) - predicted * expected + logarithm
            negative, positive = self._fractions(expected)
            return (negative + positive) * (
                op.Max(predicted, 0.0) + logarithm
            ) - positive * predicted
        columns = [op.Gather(predicted, op.constant(k), axis=1) for k in (0, 1)]
        if self._plain:
            chosen = op.Where(op.Equal(expected, 1), columns[1], columns[0])
            return -op.Log(op.Clip(chosen, self.eps, 1 - self.eps))
        fractions = self._fractions(op.Cast(expected, to=predicted.dtype))
        logs = [op.Log(op.Clip(column, self.eps, 1 - self.eps)) for column in columns]
        return -(fractions[0] * logs[0] + fractions[1] * logs[1])

    def counts(self, op: Ops, expected: Tensor) -> Tensor | None:
        """The weight of the label's class."""
        if self.class_weight is None:
            return None
        zero, one = known_weights(self.name, self.class_weight) or (1.0, 1.0)
        weight: Tensor = zero + (one - zero) * op.Cast(expected, to=TensorProto.DOUBLE)
        return weight

    def gradient(
        self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor
    ) -> Tensor | None:
        """``sigmoid(s) − y`` for scores: one node instead of four."""
        if self.on == "probabilities":
            return None
        if self._plain:
            return (op.Sigmoid(predicted) - expected) * cotangent
        negative, positive = self._fractions(expected)
        return ((negative + positive) * op.Sigmoid(predicted) - positive) * cotangent

    @property
    def _plain(self) -> bool:
        return self.class_weight is None and self.label_smoothing == 0

    def _fractions(self, expected: Tensor) -> tuple[Tensor, Tensor]:
        """q₀ and q₁ of the formula."""
        zero, one = known_weights(self.name, self.class_weight) or (1.0, 1.0)
        smooth = (1 - self.label_smoothing) * expected + 0.5 * self.label_smoothing
        return zero * (1 - smooth), one * smooth
