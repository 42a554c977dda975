"""The loss ``softmax_cross_entropy``: one class of many."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core.errors import DataError
from ortflex_core.labels import float_labels, float_scores, integer_labels, require_range
from ortflex_core.ops import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import Array, TensorSpec, shape_text


@attrs.frozen(kw_only=True)
class SoftmaxCrossEntropy(Loss):
    """Cross-entropy of the softmax of raw scores ``s`` of shape [B, C, …], classes in axis 1.

    Labels are class numbers ``y`` [B, …] in 0 … C−1: ``l = −log softmax(s)_y``, or shares of the
    classes ``q`` [B, C, …] (one-hot or soft): ``l = −Σ_c q_c · log softmax(s)_c``. The values have
    the shape [B, …]. Class numbers equal to ``ignore_index`` cost nothing and do not count in the
    mean; None ignores none.

    Raises:
        TypeError: ``ignore_index`` is not an integer.
        DataError: labels of another type or shape (:meth:`label`), or outside their range
            (:meth:`check_labels`).

    >>> SoftmaxCrossEntropy().describe()
    {'name': 'softmax_cross_entropy', 'ignore_index': -100}

    Source: torch.nn.CrossEntropyLoss before its reduction.
    """

    name: ClassVar[str] = "softmax_cross_entropy"
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    ignore_index: int | None = attrs.field(
        default=-100, metadata={"help": "the class number that costs nothing"}
    )

    @ignore_index.validator
    def _check_ignore_index(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(
                f"SoftmaxCrossEntropy.ignore_index must be an integer or None, got {value!r}"
            )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Class numbers without the class axis, or shares with it."""
        float_scores(self.name, predicted)
        shape = predicted.shape
        if shape is None or len(shape) < 2 or shape[1] == 1:
            raise DataError(
                f"{self.name} takes scores [B, C, …] of two classes or more, got {predicted}; for "
                "one score a row use log_loss"
            )
        numbers = (shape[0], *shape[2:])
        if given is None:
            return TensorSpec("expected", TensorProto.INT64, numbers)
        if given.shape is None or len(given.shape) != len(shape):
            return integer_labels(self.name, numbers, given)
        if given.shape[1] == 1:
            raise DataError(
                f"{self.name}: the labels {given} have one column; class numbers have the shape "
                f"{shape_text(numbers)}: y.reshape(-1), shares of the classes {shape_text(shape)}"
            )
        return float_labels(self.name, predicted, given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse class numbers outside 0 … C−1 and shares outside [0, 1]."""
        shape = predicted.shape
        if shape is not None and labels.ndim == len(shape):
            nothing = np.zeros(labels.shape, dtype=bool)
            hint = "One-hot and soft labels are shares of the classes."
            require_range(self.name, labels, 0, 1, allowed=nothing, hint=hint)
            return
        count = shape[1] if shape is not None else None
        last = count - 1 if isinstance(count, int) else None
        ignored = labels == (self.ignore_index if self.ignore_index is not None else np.nan)
        hint = f"The model has {count if last is not None else 'an unknown number of'} classes"
        if self.ignore_index is not None:
            hint += f", and {self.ignore_index} is ignored (ignore_index)"
        hint += ". Other class numbers or names are encoded by classes=[…]."
        require_range(self.name, labels, 0, last, allowed=np.asarray(ignored), hint=hint)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``−Σ_c q_c · log softmax(s)_c``; an ignored number matches no class and costs 0."""
        logs = op.LogSoftmax(predicted, axis=1)
        if expected.is_float:
            picked = logs * expected
        else:
            if self.ignore_index is not None and self.ignore_index >= 0:
                # A class that is ignored must match none; a negative number does not anyway.
                expected = op.Where(op.Equal(expected, self.ignore_index), -1, expected)
            picked = op.Where(self._is_class(op, predicted, expected), logs, 0.0)
        return -op.ReduceSum(picked, axes=[1], keepdims=0)  # type: ignore[no-any-return]

    def mask(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Booleans: False where the label is ignored; None for shares, of which none is."""
        if expected.is_float or self.ignore_index is None:
            return None
        return op.Not(op.Equal(expected, self.ignore_index))  # type: ignore[no-any-return]

    def gradient(
        self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor
    ) -> Tensor | None:
        """``softmax(s)·Σ_c q_c − q``: no logarithm is taken back."""
        shares = op.Softmax(predicted, axis=1)
        if expected.is_float:
            total = op.ReduceSum(expected, axes=[1], keepdims=1)
            return (shares * total - expected) * _beside_classes(op, cotangent, predicted)  # type: ignore[no-any-return]
        kept = self.mask(op, expected)
        if kept is not None:
            cotangent = op.Where(kept, cotangent, 0.0)
        here = op.Cast(self._is_class(op, predicted, expected), to=predicted.dtype)
        return (shares - here) * _beside_classes(op, cotangent, predicted)  # type: ignore[no-any-return]

    def _is_class(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """[B, C, …] booleans: whether the class number is the position in axis 1.

        GatherElements would fail on an ignored number; a comparison needs no safe one.
        """
        assert predicted.shape is not None  # label() refuses scores of unknown rank
        count = predicted.shape[1]
        if isinstance(count, int):
            classes = op.constant(np.arange(count).reshape(-1, *[1] * (len(predicted.shape) - 2)))
        else:
            size = op.Squeeze(op.Gather(op.Shape(predicted), op.constant([1])))
            classes = op.Range(op.constant(0), size, op.constant(1))
            if len(predicted.shape) > 2:
                classes = op.Reshape(classes, op.constant([-1, *[1] * (len(predicted.shape) - 2)]))
        return op.Equal(op.Unsqueeze(expected, axes=[1]), classes)  # type: ignore[no-any-return]


def _beside_classes(op: Ops, cotangent: Tensor, predicted: Tensor) -> Tensor:
    """A cotangent of values [B, …], made to broadcast to scores [B, C, …].

    A smaller one, without the batch axis, lies behind the class axis and does so already.
    """
    if cotangent.rank is None or predicted.rank is None or cotangent.rank == predicted.rank - 1:
        return op.Unsqueeze(cotangent, axes=[1])  # type: ignore[no-any-return]
    return cotangent
