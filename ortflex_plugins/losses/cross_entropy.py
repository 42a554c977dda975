"""Losses of class probabilities: ``softmax_cross_entropy``, ``kullback_leibler``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    Tensor,
    TensorSpec,
    float_labels,
    number,
    numpy_dtype,
    one_of,
    require_range,
    setting,
    short_repr,
)
from ortflex_plugins.losses._classes import (
    BALANCED,
    along_classes,
    balanced,
    check_count,
    class_count,
    class_labels,
    class_weight_field,
    is_class,
    known_weights,
    with_class_axis,
)


@attrs.frozen(kw_only=True)
class SoftmaxCrossEntropy(Loss):
    """Cross-entropy of the softmax of logits ``s`` of shape [B, C, …], with the classes along axis 1.

    For logits [B, …, C], such as those of language models, set ``axis=-1``; the shapes below change
    accordingly.

    Labels are class indices ``y`` [B, …] in 0 … C−1, with ``l = −log softmax(s)_y``, or class
    probabilities ``q`` [B, C, …] (one-hot or soft), with ``l = −Σ_c q_c · log softmax(s)_c``. The loss
    values have the shape [B, …]. Positions whose class index is ``ignore_index`` have a loss of 0 and
    do not count in the mean; with ``ignore_index=None``, every class index counts.

    With ``label_smoothing`` ε and ``class_weight`` w, the probabilities are
    ``w_c·((1 − ε)·q_c + ε/C)``, where q is 1 at the class index and 0 elsewhere. In the mean, a label
    that is a class index then has the weight ``w_y``, as in torch, and a label that consists of class
    probabilities has the weight 1. As in scikit-learn, ``class_weight="balanced"`` sets the weights
    ``w_c = n / (C·n_c)``, where n is the number of training labels and n_c is the number of training
    labels of class c.

    Raises:
        TypeError: ``ignore_index`` is not an integer.
        ValueError: ``label_smoothing`` is not in [0, 1], or a weight is negative.
        DataError: the labels have another type or shape or are outside their range, or the number of
            weights is not the number of classes.

    >>> SoftmaxCrossEntropy(class_weight=(1.0, 3.0)).class_weight
    (1.0, 3.0)

    Source: torch.nn.CrossEntropyLoss(reduction="none").
    """

    name: ClassVar[str] = "softmax_cross_entropy"
    aliases: ClassVar[tuple[str, ...]] = (
        "ce",
        "cross_entropy",
        "crossentropy",
        "categorical_crossentropy",
        "sparse_categorical_crossentropy",
    )
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    ignore_index: int | None = setting(
        default=-100, help="the class index that marks ignored positions"
    )
    axis: int = setting(default=1, validator=one_of(1, -1), help="the axis of the classes: 1 or -1")
    label_smoothing: float = setting(
        default=0.0,
        validator=number(ge=0, le=1),
        help="the fraction of a label that is distributed equally among all classes",
    )
    class_weight: tuple[float, ...] | Literal["balanced"] | None = class_weight_field()
    counted: ClassVar[tuple[str, ...]] = ("class_weight",)

    @ignore_index.validator
    def _check_ignore_index(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(
                f"SoftmaxCrossEntropy.ignore_index must be an integer or None, got {value!r}"
            )
        if value is not None and not -(2**63) <= value < 2**63:
            raise ValueError(
                "SoftmaxCrossEntropy.ignore_index must be a class index of int64, got "
                f"{short_repr(value)}"
            )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Class indices without the class axis, or fractions with it."""
        out = class_labels(self.name, predicted, given, self.axis)
        check_count(self.name, predicted, self.class_weight, self.axis)
        return out

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse class indices outside 0 … C−1 and fractions outside [0, 1]."""
        shape = predicted.shape
        if shape is not None and labels.ndim == len(shape):
            hint = "One-hot and soft labels are class probabilities."
            require_range(self.name, labels, 0, 1, hint=hint)
            return
        count = shape[self.axis] if shape is not None else None
        last = count - 1 if isinstance(count, int) else None
        ignored = labels == (self.ignore_index if self.ignore_index is not None else np.nan)
        hint = f"The model has {count if last is not None else 'an unknown number of'} classes"
        if self.ignore_index is not None:
            hint += f", and {self.ignore_index} is ignored (ignore_index)"
        hint += (
            ". Other class indices or names are encoded by classes=[…]; another number of classes "
        )
        hint += "needs a new last layer: head=…"
        require_range(self.name, labels, 0, last, allowed=np.asarray(ignored), hint=hint)

    def fitted(self, predicted: TensorSpec, labels: Array) -> SoftmaxCrossEntropy:
        """With ``class_weight="balanced"``, n / (C·n_c) of the labels that are not ignored."""
        if self.class_weight != BALANCED:
            return self
        shape = predicted.shape
        if shape is not None and labels.ndim == len(shape):
            others = tuple(k for k in range(labels.ndim) if k != self.axis % labels.ndim)
            counts = labels.sum(axis=others, dtype=np.float64)
        else:
            kept = labels[labels != self.ignore_index] if self.ignore_index is not None else labels
            count = shape[self.axis] if shape is not None else None
            counts = np.bincount(kept.ravel(), minlength=count if isinstance(count, int) else 0)
        return attrs.evolve(self, class_weight=balanced(self.name, counts))

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``−Σ_c q_c · log softmax(s)_c``; an ignored number matches no class, so its loss is 0."""
        logs = op.LogSoftmax(predicted, axis=self.axis)
        if not self._plain:
            terms = logs * self._fractions(op, predicted, expected)
        elif expected.is_float:
            terms = logs * expected
        else:
            terms = op.Where(self._matches(op, predicted, expected), logs, 0.0)
        return -op.ReduceSum(terms, axes=[self.axis], keepdims=0)

    def mask(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Booleans: False where the label is ignored; None for fractions, which are never ignored."""
        if expected.is_float or self.ignore_index is None:
            return None
        return op.Not(op.Equal(expected, self.ignore_index))

    def counts(self, op: Ops, expected: Tensor) -> Tensor | None:
        """The weight of the label's class, 0 where it is ignored; fractions count 1 each."""
        kept = self.mask(op, expected)
        if self.class_weight is None or expected.is_float:
            return kept
        if kept is not None:
            expected = op.Where(kept, expected, 0)  # an ignored number is not a valid index
        numbers = known_weights(self.name, self.class_weight)
        weights = op.Gather(op.constant(np.asarray(numbers, np.float64)), expected)
        return weights if kept is None else op.Where(kept, weights, 0.0)

    def gradient(
        self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor
    ) -> Tensor | None:
        """``softmax(s)·Σ_c q_c − q``, without the logarithm of the formula."""
        softmax = op.Softmax(predicted, axis=self.axis)
        if not self._plain or expected.is_float:
            fractions = expected if self._plain else self._fractions(op, predicted, expected)
            total = op.ReduceSum(fractions, axes=[self.axis], keepdims=1)
            return (softmax * total - fractions) * with_class_axis(
                op, cotangent, predicted, self.axis
            )
        kept = self.mask(op, expected)
        if kept is not None:
            cotangent = op.Where(kept, cotangent, 0.0)
        one_hot = op.Cast(is_class(op, predicted, expected, self.axis), to=predicted.dtype)
        return (softmax - one_hot) * with_class_axis(op, cotangent, predicted, self.axis)

    @property
    def _plain(self) -> bool:
        return self.class_weight is None and self.label_smoothing == 0

    def _matches(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """Booleans [B, C, …]: True at the class of each label, unless the label is ignored."""
        if self.ignore_index is not None and self.ignore_index >= 0:
            # An ignored class must match no class; a negative number matches none anyway.
            expected = op.Where(op.Equal(expected, self.ignore_index), -1, expected)
        return is_class(op, predicted, expected, self.axis)

    def _fractions(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The q of the formula [B, C, …]: smoothed and weighted labels, 0 where they are ignored."""
        assert predicted.rank is not None  # label() refuses scores of unknown rank
        smoothing = self.label_smoothing
        fractions: Tensor = expected
        if not expected.is_float:
            fractions = op.Cast(self._matches(op, predicted, expected), to=predicted.dtype)
        if smoothing:
            count = class_count(op, predicted, self.axis)
            count = count if isinstance(count, int) else op.Cast(count, to=predicted.dtype)
            even = smoothing / count
            fractions = (1 - smoothing) * fractions + even
            kept = self.mask(op, expected)
            if kept is not None:
                fractions = op.Where(op.Unsqueeze(kept, axes=[self.axis]), fractions, 0.0)
        if (numbers := known_weights(self.name, self.class_weight)) is not None:
            dtype = numpy_dtype(predicted.dtype)
            weights = along_classes(numbers, predicted.rank, dtype, self.axis)
            fractions = fractions * weights
        return fractions


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
