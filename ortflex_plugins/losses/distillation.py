"""Losses that compare a model with a teacher, a larger model: ``distillation`` and ``feature_matching``."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

import attrs
import numpy as np

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    Shape,
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
from ortflex_plugins.losses._classes import Specs, Tensors, class_labels, is_class

S = TypeVar("S", TensorSpec, Specs)


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
class _Taught(Loss[Tensors, S], Generic[S]):
    """The fields of a teacher."""

    teacher: str = setting(validator=_text, help="the .onnx file of the teacher")
    teacher_tensor: str | None = setting(
        default=None,
        validator=attrs.validators.optional(_text),
        help="the tensor of the teacher that the loss reads; by default, its only float output",
    )
    teacher_inputs: Mapping[str, str] | None = setting(
        default=None,
        validator=attrs.validators.optional(_names),
        help="a mapping from the teacher's inputs to the student's inputs, if their names differ",
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
    def check_teacher(self, predicted: S, taught: TensorSpec) -> None:
        """Refuse a tensor of the teacher that does not fit."""


@attrs.frozen(kw_only=True)
class Distillation(_Taught[TensorSpec]):
    """Distillation: ``l = α·T²·KL(t ‖ s) + (1 − α)·cross-entropy``, computed from logits [B, C, …].

    ``KL(t ‖ s) = Σ_c t_c·(log t_c − log s_c)`` compares ``t = softmax(teacher / T)`` with
    ``s = softmax(student / T)``, along ``axis`` (1, or -1 for logits [B, …, C]). The cross-entropy is
    that of ``softmax_cross_entropy`` with the labels, which are class indices [B, …] or class
    probabilities [B, C, …]. With α = 1, no labels are needed. The loss values have the shape [B, …].
    The factor T² keeps the gradient of the first term at about the same magnitude for every T.

    The teacher is a model in another .onnx file. It receives the same rows as the student. If the data
    consists of arrays or files, the teacher's logits are normally computed before training, once for
    each row.

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
        default=2.0,
        validator=number(gt=0),
        help="the temperature T, by which the logits are divided",
    )
    alpha: float = hyper(
        default=0.5,
        validator=number(ge=0, le=1),
        help="the weight α of the teacher's term; with 1, no labels are needed",
    )
    axis: int = setting(default=1, validator=one_of(1, -1), help="the axis of the classes: 1 or -1")

    @property
    def needs_labels(self) -> bool:
        """Whether alpha is less than 1."""
        return self.alpha < 1

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Class indices without the class axis, or fractions with it."""
        return class_labels(self.name, predicted, given, self.axis)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse class indices outside 0 … C−1 and fractions outside [0, 1]."""
        shape = predicted.shape
        if shape is not None and labels.ndim == len(shape):
            hint = "One-hot and soft labels are class probabilities."
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

    def per_sample(self, op: Ops, predicted: Tensors, expected: Tensor | None) -> Tensor:
        """``α·T²·KL(t ‖ s) + (1 − α)·cross-entropy``."""
        t, scores = self.temperature, predicted["predicted"]
        theirs = op.LogSoftmax(predicted["teacher"] / t, axis=self.axis)
        ours = op.LogSoftmax(scores / t, axis=self.axis)
        parts = op.Exp(theirs) * (theirs - ours)
        divergence = (t * t) * op.ReduceSum(parts, axes=[self.axis], keepdims=0)
        if expected is None:
            return self.alpha * divergence
        logs = op.LogSoftmax(scores, axis=self.axis)
        if expected.is_float:
            terms = logs * expected
        else:
            terms = op.Where(is_class(op, scores, expected, self.axis), logs, 0.0)
        entropy = -op.ReduceSum(terms, axes=[self.axis], keepdims=0)
        return self.alpha * divergence + (1 - self.alpha) * entropy


@attrs.frozen(kw_only=True)
class FeatureMatching(_Taught[Specs]):
    """Squared distance to a tensor of a teacher: ``l = mean((p − t)²)`` over all axes except the first.

    The key ``predicted`` selects the tensor p of the student, and ``teacher_tensor`` selects the
    tensor t of the teacher. Both must have the same shape [B, …]. The loss values have the shape [B].
    No labels are needed.

    With ``projection``, the two tensors may have different sizes m and n along ``axis``. The student's
    tensor is then multiplied along this axis by a trained matrix [m, n]. For images, this is a 1×1
    convolution. The initial values of the matrix are drawn uniformly between −1/√m and 1/√m. Checkpoints
    contain the matrix, but exports do not.

    Raises:
        DataError: the two tensors have other shapes, or a projection has nothing to multiply.

    >>> FeatureMatching(teacher="large.onnx", teacher_tensor="features").needs_labels
    False

    Source: A. Romero et al., "FitNets: hints for thin deep nets", 2014, arXiv 1412.6550, which calls
    the projection a regressor.
    """

    name: ClassVar[str] = "feature_matching"
    aliases: ClassVar[tuple[str, ...]] = ("fitnet", "fitnets", "hint")
    tensors: ClassVar[tuple[str, ...]] = ("features",)
    needs_labels = False

    projection: bool = setting(
        default=False,
        help="whether a trained matrix maps the student's tensor to the size of the teacher's tensor "
        "along ``axis``",
    )
    axis: int = setting(
        default=1, validator=one_of(1, -1), help="the axis of the projection: 1 or -1"
    )

    def check_teacher(self, predicted: Specs, taught: TensorSpec) -> None:
        """Refuse a tensor of another shape."""
        own = predicted["features"]
        float_scores(self.name, own)
        ours, theirs = own.shape, taught.shape
        if self.projection and ours is not None and theirs is not None:
            ours, theirs = self._without_axis(ours), self._without_axis(theirs)
        if not shapes_compatible(ours, theirs):
            way = "projection=True, if only the sizes of one axis differ (axis=)"
            raise DataError(
                f"{self.name}: the teacher's tensor {taught} and the model's {own} have other sizes; "
                "choose tensors of equal shapes (predicted=, teacher_tensor=)"
                + ("" if self.projection else f", or {way}")
            )

    def _without_axis(self, shape: Shape) -> Shape:
        return shape[:1] + shape[2:] if self.axis == 1 else shape[:-1]

    def parameters(self, predicted: Specs, generator: np.random.Generator) -> Mapping[str, Array]:
        """The matrix of the projection."""
        if not self.projection:
            return {}
        shapes = [predicted[role].shape or () for role in ("features", "teacher")]
        sizes = [shape[self.axis] if len(shape) > 1 else None for shape in shapes]
        if not all(isinstance(size, int) for size in sizes):
            raise DataError(
                f"{self.name}: the sizes of axis {self.axis} of {predicted['features']} and of the "
                f"teacher's {predicted['teacher']} have to be known for a projection"
            )
        ours, theirs = (int(size) for size in sizes if isinstance(size, int))
        bound = 1 / math.sqrt(ours)
        return {"projection": generator.uniform(-bound, bound, (ours, theirs))}

    def per_sample(self, op: Ops, predicted: Tensors, expected: Tensor | None) -> Tensor:
        """``mean((p − t)²)`` of each row."""
        own, taught = predicted["features"], predicted["teacher"]
        assert own.rank is not None
        if self.projection:
            own, taught = (self._axis_last(op, tensor) for tensor in (own, taught))
            own = op.MatMul(own, predicted["projection"])
        error = own - taught
        squares = error * error
        if own.rank == 1:
            return squares
        return op.ReduceMean(squares, axes=list(range(1, own.rank or 1)), keepdims=0)

    def _axis_last(self, op: Ops, tensor: Tensor) -> Tensor:
        """The axis of the projection as the last one; the mean does not depend on the order."""
        rank = tensor.rank or 0
        if self.axis == -1 or rank == 2:
            return tensor
        return op.Transpose(tensor, perm=[0, *range(2, rank), 1])
