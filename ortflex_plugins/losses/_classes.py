"""What the losses over several classes share: the class axis, its weights and its labels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core.errors import DataError
from ortflex_core.labels import float_labels, float_scores, integer_labels
from ortflex_core.ops import Ops, Tensor
from ortflex_core.types import Array, TensorSpec, shape_text


def class_weight_field() -> Any:
    """The field ``class_weight``: one positive number or 0 a class, or None."""
    return attrs.field(
        default=None,
        converter=attrs.converters.optional(_numbers),
        validator=attrs.validators.optional(_check_weights),
        metadata={"help": "what each class counts; not set: all alike"},
    )


def _numbers(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(values.tolist() if isinstance(values, np.ndarray) else values)


def _check_weights(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    good = len(value) > 1 and all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) and v >= 0
        for v in value
    )
    if not good or not any(value):
        raise ValueError(
            f"{type(instance).__name__}.{attribute.name} must be numbers >= 0, one a class and not "
            f"all 0, got {tuple(value)!r}"
        )


def class_labels(loss: str, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
    """Class numbers without the class axis, or shares with it, beside scores [B, C, …].

    Raises:
        DataError: the scores have no class axis, or the labels another type or shape.
    """
    float_scores(loss, predicted)
    shape = predicted.shape
    if shape is None or len(shape) < 2 or shape[1] == 1:
        raise DataError(
            f"{loss} takes scores [B, C, …] of two classes or more, got {predicted}; for "
            "one score a row use log_loss"
        )
    numbers = (shape[0], *shape[2:])
    if given is None:
        return TensorSpec("expected", TensorProto.INT64, numbers)
    if given.shape is None or len(given.shape) != len(shape):
        return integer_labels(loss, numbers, given)
    if given.shape[1] == 1:
        raise DataError(
            f"{loss}: the labels {given} have one column; class numbers have the shape "
            f"{shape_text(numbers)}: y.reshape(-1), shares of the classes {shape_text(shape)}"
        )
    return float_labels(loss, predicted, given)


def check_count(loss: str, predicted: TensorSpec, weights: tuple[float, ...] | None) -> None:
    """Refuse class weights of another number of classes, where that number is known.

    Raises:
        DataError: the two numbers.
    """
    count = predicted.shape[1] if predicted.shape is not None else None
    if weights is not None and isinstance(count, int) and len(weights) != count:
        raise DataError(
            f"{loss}: class_weight has {len(weights)} numbers, the scores {predicted} have {count} "
            "classes; give one number a class, in the order of the scores"
        )


def along_classes(values: Iterable[float], rank: int, dtype: Any) -> Array:
    """One number a class, of shape [C, 1, …], to broadcast to scores [B, C, …] of some rank."""
    return np.asarray(list(values), dtype).reshape(-1, *[1] * (rank - 2))


def is_class(op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
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


def beside_classes(op: Ops, cotangent: Tensor, predicted: Tensor) -> Tensor:
    """A cotangent of values [B, …], made to broadcast to scores [B, C, …].

    A smaller one, without the batch axis, lies behind the class axis and does so already.
    """
    if cotangent.rank is None or predicted.rank is None or cotangent.rank == predicted.rank - 1:
        return op.Unsqueeze(cotangent, axes=[1])  # type: ignore[no-any-return]
    return cotangent
