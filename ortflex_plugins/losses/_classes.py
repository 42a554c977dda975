"""Shared by the losses over several classes: the class axis, class weights and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core import (
    Array,
    DataError,
    Ops,
    Tensor,
    TensorSpec,
    float_labels,
    float_scores,
    integer_labels,
    setting,
    shape_mismatch,
    shape_text,
    shapes_compatible,
)

BALANCED: Literal["balanced"] = "balanced"
"""The class weights n / (C · n_c) of n labels, n_c of them of class c, as in scikit-learn."""

Tensors = Mapping[str, Tensor]
Specs = Mapping[str, TensorSpec]
ClassWeight = tuple[float, ...] | Literal["balanced"] | None


def class_weight_field() -> Any:
    """The field ``class_weight``: one number >= 0 per class, ``"balanced"`` or None."""
    return setting(
        default=None,
        converter=attrs.converters.optional(_numbers),
        validator=attrs.validators.optional(_check_weights),
        help="the weight of each class; ``balanced`` computes the weights from the training "
        "labels; by default, all weights are equal",
    )


def balanced(loss: str, counts: Array) -> tuple[float, ...]:
    """The weights n / (C · n_c) of classes with n_c labels each.

    >>> balanced("log_loss", np.array([3, 1]))
    (0.6666666666666666, 2.0)

    Raises:
        DataError: a class has no label.
    """
    if missing := np.flatnonzero(counts == 0).tolist():
        raise DataError(
            f"{loss}: class_weight='balanced' divides by the number of labels of each class, but the "
            f"training has no label of {'class' if len(missing) == 1 else 'the classes'} "
            f"{', '.join(map(str, missing[:10]))}; pass one number per class instead"
        )
    return tuple((counts.sum() / (len(counts) * counts)).tolist())


def known_weights(loss: str, given: ClassWeight) -> tuple[float, ...] | None:
    """The class weights as numbers.

    Raises:
        DataError: they are to be counted, and no training has begun.
    """
    if isinstance(given, str):
        raise DataError(
            f"{loss}: class_weight={given!r} counts the training labels, so call fit first; "
            "or pass one number per class"
        )
    return given


def _numbers(values: Iterable[Any]) -> Any:
    if isinstance(values, str):
        return values
    if isinstance(values, Mapping):  # its keys would be taken as the weights
        raise TypeError(
            "class_weight must be numbers, one per class in the order of the scores, got the "
            f"mapping {dict(values)!r}"
        )
    return tuple(values.tolist() if isinstance(values, np.ndarray) else values)


def _check_weights(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value == BALANCED:
        return
    good = len(value) > 1 and all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and v >= 0
        for v in value
    )
    if not good or not any(value):
        raise ValueError(
            f"{type(instance).__name__}.{attribute.name} must be numbers >= 0, one per class and "
            f"not all 0, or {BALANCED!r}, got {value!r}"
        )


def class_labels(
    loss: str, predicted: TensorSpec, given: TensorSpec | None, axis: int = 1
) -> TensorSpec:
    """The labels of scores [B, C, …] or [B, …, C]: class indices [B, …], or fractions in the same shape.

    Raises:
        DataError: the scores have no class axis, or the labels have another type or shape.
    """
    float_scores(loss, predicted)
    shape = predicted.shape
    if shape is None or len(shape) < 2 or shape[axis] == 1:
        form = "[B, C, …]" if axis == 1 else "[B, …, C]"
        raise DataError(
            f"{loss} expects scores {form} of two or more classes, got {predicted}; for one score "
            "per row use log_loss"
        )
    numbers = (shape[0], *shape[2:]) if axis == 1 else shape[:-1]
    if given is None:
        return TensorSpec("expected", TensorProto.INT64, numbers)
    if given.shape is None or len(given.shape) != len(shape):
        if not shapes_compatible(numbers, given.shape) and shapes_compatible(
            shape[:-1], given.shape
        ):
            wanted = TensorSpec("expected", TensorProto.INT64, numbers)
            raise DataError(
                f"{shape_mismatch(loss, wanted, given)}. If the classes of {predicted} are on its "
                "last axis, set axis=-1, if the loss has this parameter"
            )
        return integer_labels(loss, numbers, given)
    if given.shape[axis] == 1:
        raise DataError(
            f"{loss}: the labels {given} have one column; class indices need the shape "
            f"{shape_text(numbers)}: y.reshape(-1); class probabilities need the shape "
            f"{shape_text(shape)}"
        )
    return float_labels(loss, predicted, given)


def check_count(loss: str, predicted: TensorSpec, weights: ClassWeight, axis: int = 1) -> None:
    """Refuse class weights if the number of classes is known and differs from theirs.

    Raises:
        DataError: names both numbers.
    """
    count = predicted.shape[axis] if predicted.shape is not None else None
    known = weights is not None and weights != BALANCED
    if weights and known and isinstance(count, int) and len(weights) != count:
        raise DataError(
            f"{loss}: class_weight has {len(weights)} numbers, but the scores {predicted} have "
            f"{count} classes; pass one number per class, in the order of the scores"
        )


def along_classes(values: Iterable[float], rank: int, dtype: Any, axis: int = 1) -> Array:
    """One number per class, in a shape [C, 1, …] that broadcasts to scores of this rank."""
    return np.asarray(list(values), dtype).reshape(-1, *_ones_after(rank, axis))


def _ones_after(rank: int, axis: int) -> list[int]:
    """A 1 for each axis after the classes."""
    return [1] * (rank - 2) if axis == 1 else []


def class_count(op: Ops, predicted: Tensor, axis: int) -> int | Tensor:
    """The number of classes: a number where it is known, else an int64 scalar."""
    assert predicted.shape is not None  # label() refuses scores of unknown rank
    count = predicted.shape[axis]
    if isinstance(count, int):
        return count
    return op.Squeeze(op.Gather(op.Shape(predicted), op.constant([axis])))


def is_class(op: Ops, predicted: Tensor, expected: Tensor, axis: int = 1) -> Tensor:
    """Booleans of the scores' shape: whether the class index is the position in the class axis.

    This is a comparison, because GatherElements would fail on an ignored class index.
    """
    count = class_count(op, predicted, axis)
    ones = _ones_after(len(predicted.shape or ()), axis)
    if isinstance(count, int):
        classes = op.constant(np.arange(count).reshape(-1, *ones))
    else:
        classes = op.Range(op.constant(0), count, op.constant(1))
        if ones:
            classes = op.Reshape(classes, op.constant([-1, *ones]))
    return op.Equal(op.Unsqueeze(expected, axes=[axis]), classes)


def with_class_axis(op: Ops, cotangent: Tensor, predicted: Tensor, axis: int = 1) -> Tensor:
    """A cotangent of values [B, …], in a shape that broadcasts to scores [B, C, …] or [B, …, C].

    A cotangent of smaller rank has no batch axis and broadcasts to scores [B, C, …] as it is.
    """
    if axis == -1:
        return op.Unsqueeze(cotangent, axes=[-1])
    if cotangent.rank is None or predicted.rank is None or cotangent.rank == predicted.rank - 1:
        return op.Unsqueeze(cotangent, axes=[1])
    return cotangent
