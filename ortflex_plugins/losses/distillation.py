"""Losses that compare a model with a teacher, a larger model: ``distillation`` and ``feature_matching``."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    TeacherTensor,
    Tensor,
    TensorSpec,
    float_scores,
    hyper,
    number,
    one_of,
    require_range,
    setting,
    shapes_compatible,
)
from ortflex_plugins.losses._classes import class_labels, is_class


def _text(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise TypeError(
            f"{type(instance).__name__}.{attribute.name} must be the path of an .onnx file, got {value!r}"
        )


def _names(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    names = isinstance(value, Mapping) and all(
        isinstance(n, str) for n in [*value, *value.values()]
    )
    if not names:
        raise TypeError(
            f"{type(instance).__name__}.{attribute.name} must have names of our inputs by names of the "
            f"teacher's inputs, got {value!r}"
        )


@attrs.frozen(kw_only=True)
class _Taught(Loss):
    """The fields of a teacher."""

    teacher: str = setting(validator=_text, help="the .onnx file of the teacher")
    teacher_tensor: str | None = setting(
        default=None,
        validator=attrs.validators.optional(_text),
        help="the tensor of the teacher; by default its only float output",
    )
    teacher_inputs: Mapping[str, str] | None = setting(
        default=None,
        validator=attrs.validators.optional(_names),
        help="our inputs by those of the teacher, where names differ",
    )

    @property
    def taught(self) -> TeacherTensor:
        """The tensor of the teacher."""
        return TeacherTensor(
            model=self.teacher,
            tensor=self.teacher_tensor,
            inputs=self.teacher_inputs or {},
            check=self.check_teacher,
        )

    @abc.abstractmethod
    def check_teacher(self, predicted: TensorSpec, taught: TensorSpec) -> None:
        """Refuse a tensor of the teacher that does not fit."""


@attrs.frozen(kw_only=True)
class Distillation(_Taught):
    """Distillation: ``l = α·T²·KL(t ‖ s) + (1 − α)·cross-entropy``, from logits [B, C, …].

    ``t = softmax(teacher / T)`` and ``s = softmax(student / T)`` along ``axis`` (1, or -1 for scores
    [B, …, C]), ``KL(t ‖ s) = Σ_c t_c·(log t_c − log s_c)``. The cross-entropy is that of
    ``softmax_cross_entropy`` with the labels: class numbers [B, …] or fractions [B, C, …]. With α = 1 no
    labels are needed. Values have the shape [B, …]. T² keeps the size of the gradient of the first term
    when T changes.

    The teacher is another .onnx file, which gets the same rows. Its scores are computed once for each row,
    before the training.

    Raises:
        ValueError: the temperature is not > 0, or alpha is not in [0, 1].
        DataError: teacher and student have other classes, or the labels do not fit.

    >>> Distillation(teacher="large.onnx", alpha=1.0).needs_labels
    False

    Source: G. Hinton, O. Vinyals and J. Dean, "Distilling the knowledge in a neural network", 2015,
    arXiv 1503.02531.
    """

    name: ClassVar[str] = "distillation"
    aliases: ClassVar[tuple[str, ...]] = ("kd", "knowledge_distillation")
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    temperature: float = hyper(
        default=2.0, validator=number(gt=0), help="T: by which scores are divided"
    )
    alpha: float = hyper(
        default=0.5, validator=number(ge=0, le=1), help="the part of the teacher; 1: no labels"
    )
    axis: int = setting(default=1, validator=one_of(1, -1), help="the axis of the classes: 1 or -1")

    @property
    def needs_labels(self) -> bool:
        """Whether alpha is less than 1."""
        return self.alpha < 1

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Class numbers without the class axis, or fractions with it."""
        return class_labels(self.name, predicted, given, self.axis)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse class numbers outside 0 … C−1 and fractions outside [0, 1]."""
        shape = predicted.shape
        if shape is not None and labels.ndim == len(shape):
            hint = "One-hot and soft labels are fractions of the classes."
            require_range(self.name, labels, 0, 1, hint=hint)
            return
        count = None if shape is None else shape[self.axis]
        last = count - 1 if isinstance(count, int) else None
        require_range(self.name, labels, 0, last, hint=f"The model has {count} classes.")

    def check_teacher(self, predicted: TensorSpec, taught: TensorSpec) -> None:
        """Refuse a teacher of other classes."""
        class_labels(self.name, predicted, None, self.axis)
        if not shapes_compatible(predicted.shape, taught.shape):
            raise DataError(
                f"{self.name}: the teacher's scores {taught} and those of the model, {predicted}, have "
                "other classes or positions; give the model a last layer for the classes of the teacher "
                "(head=), or name another tensor of the teacher (teacher_tensor=)"
            )

    def per_sample(
        self, op: Ops, predicted: Tensor, expected: Tensor | None, taught: Tensor | None = None
    ) -> Tensor:
        """``α·T²·KL(t ‖ s) + (1 − α)·cross-entropy``."""
        assert taught is not None
        t = self.temperature
        theirs = op.LogSoftmax(taught / t, axis=self.axis)
        ours = op.LogSoftmax(predicted / t, axis=self.axis)
        parts = op.Exp(theirs) * (theirs - ours)
        divergence = (t * t) * op.ReduceSum(parts, axes=[self.axis], keepdims=0)
        if expected is None:
            return self.alpha * divergence
        logs = op.LogSoftmax(predicted, axis=self.axis)
        if expected.is_float:
            terms = logs * expected
        else:
            terms = op.Where(is_class(op, predicted, expected, self.axis), logs, 0.0)
        entropy = -op.ReduceSum(terms, axes=[self.axis], keepdims=0)
        return self.alpha * divergence + (1 - self.alpha) * entropy


@attrs.frozen(kw_only=True)
class FeatureMatching(_Taught):
    """Distance to a tensor of a teacher: ``l = mean((p − t)²)`` over all axes but the first.

    ``p`` is the tensor of the model that ``predicted`` names and ``t`` the tensor ``teacher_tensor`` of the
    teacher, of the same shape [B, …]; values have the shape [B]. No labels are needed.

    Raises:
        DataError: the two tensors have other shapes.

    >>> FeatureMatching(teacher="large.onnx", teacher_tensor="features").needs_labels
    False

    Source: A. Romero et al., "FitNets: hints for thin deep nets", 2014, arXiv 1412.6550, without its
    regressor.
    """

    name: ClassVar[str] = "feature_matching"
    aliases: ClassVar[tuple[str, ...]] = ("fitnet", "fitnets", "hint")

    @property
    def needs_labels(self) -> bool:
        """No labels."""
        return False

    def check_teacher(self, predicted: TensorSpec, taught: TensorSpec) -> None:
        """Refuse a tensor of another shape."""
        float_scores(self.name, predicted)
        if not shapes_compatible(predicted.shape, taught.shape):
            raise DataError(
                f"{self.name}: the teacher's tensor {taught} and the model's {predicted} have other sizes; "
                "choose tensors of equal shapes (predicted=, teacher_tensor=)"
            )

    def per_sample(
        self, op: Ops, predicted: Tensor, expected: Tensor | None, taught: Tensor | None = None
    ) -> Tensor:
        """``mean((p − t)²)`` of each row."""
        assert taught is not None
        assert predicted.rank is not None
        error = predicted - taught
        squares = error * error
        if predicted.rank == 1:
            return squares
        return op.ReduceMean(squares, axes=list(range(1, predicted.rank)), keepdims=0)
