"""The loss ``kullback_leibler``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    Tensor,
    TensorSpec,
    float_labels,
    one_of,
    require_range,
    setting,
)
from ortflex_plugins.losses._classes import with_class_axis

# The smallest fraction in the logarithm: y·log y is 0 at y = 0, but log 0 is infinite.
_TINY = 1e-37


@attrs.frozen(kw_only=True)
class KullbackLeibler(Loss):
    """Kullback-Leibler divergence of labels from a prediction: ``l = Σ_c y_c·(log y_c − log p_c)``.

    Labels are class probabilities ``y`` in the shape of the prediction, [B, C, …], with the classes
    along axis 1. The loss values have the shape [B, …]. With ``on="scores"``, ``p`` is the softmax of
    the prediction, so the prediction can be logits or log probabilities. With
    ``on="log_probabilities"``, the prediction is ``log p`` and is not normalized.

    Raises:
        ValueError: ``on`` has another value.
        DataError: the labels have another shape, are outside [0, 1], or are not numbers; or the
            prediction has no class axis.

    >>> KullbackLeibler().describe()
    {'name': 'kullback_leibler', 'on': 'scores'}

    Source: S. Kullback and R. Leibler, "On information and sufficiency" (1951);
    torch.nn.KLDivLoss(reduction="batchmean"), for ``on="log_probabilities"``.
    """

    name: ClassVar[str] = "kullback_leibler"
    aliases: ClassVar[tuple[str, ...]] = ("kl", "kld", "kl_div", "kl_divergence")

    on: Literal["scores", "log_probabilities"] = setting(
        default="scores",
        validator=one_of("scores", "log_probabilities"),
        help="the output of the model: logits or log probabilities",
    )

    @property
    def scores(self) -> Literal["any", "raw"]:  # type: ignore[override]  # depends on a field here
        """Raw, unless the prediction is logarithms of probabilities."""
        return "raw" if self.on == "scores" else "any"

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        if predicted.shape is None or len(predicted.shape) < 2 or predicted.shape[1] == 1:
            raise DataError(
                "kullback_leibler expects predictions [B, C, …] of two or more classes, got "
                f"{predicted}"
            )
        return float_labels(self.name, predicted, given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse fractions outside [0, 1]."""
        require_range(self.name, labels, 0, 1, hint="They are class probabilities.")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        logs = op.LogSoftmax(predicted, axis=1) if self.on == "scores" else predicted
        surprise = op.Log(op.Max(expected, _TINY)) - logs
        return op.ReduceSum(expected * surprise, axes=[1], keepdims=0)

    def gradient(
        self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor
    ) -> Tensor | None:
        """``softmax(s)·Σ_c y_c − y``, or ``−y`` for logarithms of probabilities."""
        slope = -expected
        if self.on == "scores":
            total = op.ReduceSum(expected, axes=[1], keepdims=1)
            slope = op.Softmax(predicted, axis=1) * total - expected
        return slope * with_class_axis(op, cotangent, predicted)
