"""Labels of losses: the types, shapes and ranges that fit a prediction, and their error messages.

Shapes are compared, never broadcast: [B] and [B, 1] together would silently become [B, B].
"""

from __future__ import annotations

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core.compiler.graph.ops import FLOATS
from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array, Shape, TensorSpec, dtype_name, shape_text

INTEGERS = frozenset(
    {TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64}
    | {TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64}
)
NUMBERS = FLOATS | INTEGERS | {TensorProto.BOOL}


def shapes_compatible(wanted: Shape | None, got: Shape | None) -> bool:
    """Whether two shapes can be the same: equal ranks, equal sizes where both are numbers.

    >>> shapes_compatible(("N", 3), (15, 3)), shapes_compatible(("N", 1), (15,))
    (True, False)
    >>> shapes_compatible((None, 3), ("N", 1))
    False
    """
    if wanted is None or got is None:
        return True
    return len(wanted) == len(got) and all(
        w == g
        for w, g in zip(wanted, got, strict=True)
        if isinstance(w, int) and isinstance(g, int)
    )


def float_scores(loss: str, predicted: TensorSpec) -> None:
    """Refuse a prediction that is not a tensor of floating-point numbers."""
    if predicted.dtype not in FLOATS:
        raise DataError(
            f"{loss}: the prediction {predicted} is not floating-point, so it has no gradient; "
            "attach the loss to a float tensor of the graph (predicted=)"
        )


def float_labels(loss: str, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
    """Labels in the shape and type of the prediction, converted from any real numbers.

    Raises:
        DataError: the prediction is not floating-point, the labels are not numbers, or their
            shapes differ.

    >>> y = TensorSpec("Y", TensorProto.FLOAT, ("N", 1))
    >>> str(float_labels("huber", y, TensorSpec("y", TensorProto.INT64, (15, 1))))
    'expected: float32[N, 1]'
    """
    float_scores(loss, predicted)
    if given is not None:
        if given.dtype not in NUMBERS:
            raise DataError(
                f"{loss}: labels must be real numbers, got {given}{_numbers_hint(given)}"
            )
        if not shapes_compatible(predicted.shape, given.shape):
            raise DataError(shape_mismatch(loss, predicted, given))
    return attrs.evolve(predicted, name="expected")


def integer_labels(loss: str, shape: Shape, given: TensorSpec) -> TensorSpec:
    """Class indices (int64) of the given shape, converted from integers only.

    Raises:
        DataError: the labels are not integers, or have another shape.
    """
    wanted = TensorSpec("expected", TensorProto.INT64, shape)
    if given.dtype not in INTEGERS | {TensorProto.BOOL}:
        hint = ""
        if given.dtype in FLOATS:
            hint = "; if they are whole numbers, convert them: y.astype(numpy.int64)"
        raise DataError(
            f"{loss}: labels must be class indices (integers) of shape {shape_text(shape)}, "
            f"got {given}{hint or _numbers_hint(given)}"
        )
    if not shapes_compatible(shape, given.shape):
        raise DataError(shape_mismatch(loss, wanted, given))
    return wanted


def shape_mismatch(loss: str, wanted: TensorSpec, given: TensorSpec) -> str:
    """The error message for labels of another shape, with the reshape that corrects it."""
    text = (
        f"{loss}: labels must have the shape {shape_text(wanted.shape)}, got {given}; "
        "shapes are never broadcast"
    )
    if wanted.shape is None or given.shape is None:
        return text
    classes = wanted.shape[1] if len(wanted.shape) > 1 else None
    if given.dtype in INTEGERS and classes is not None and classes != 1:
        numbers = (wanted.shape[0], *wanted.shape[2:])
        if any(
            shapes_compatible(shape, given.shape)
            for shape in (numbers, (numbers[0], 1, *numbers[1:]))
        ):
            return f"{text}. For class indices {shape_text(numbers)} use softmax_cross_entropy"
    if [d for d in wanted.shape[1:] if d != 1] == [d for d in given.shape[1:] if d != 1]:
        target = ", ".join(str(d) if isinstance(d, int) else "-1" for d in wanted.shape[1:])
        return f"{text}. Reshape them: y.reshape({', '.join(['-1', target] if target else ['-1'])})"
    return text


def require_range(
    loss: str,
    labels: Array,
    low: float,
    high: float | None,
    *,
    hint: str,
    allowed: Array | None = None,
) -> None:
    """Refuse label values outside [low, high], or outside [low, ∞) where ``high`` is None.

    ``hint`` is the end of the message. ``allowed`` marks values that are accepted in any case. NaN
    outside of them is refused.

    Raises:
        DataError: the range, how many values are outside, the first row and its value.
    """
    inside = labels >= low if high is None else (labels >= low) & (labels <= high)
    wrong = ~inside if allowed is None else ~(inside | allowed)
    if not wrong.any():
        return
    place = np.unravel_index(int(wrong.argmax()), wrong.shape)
    value = labels[place].item()
    where = f"row {place[0]}" + (
        f", position {tuple(map(int, place[1:]))}" if len(place) > 1 else ""
    )
    top = "" if high is None else f" and at most {high:g}"
    # A single number next to the allowed ones: the hint names them.
    span = f"at least {low:g}{top}" if low != high else "those of its classes"
    raise DataError(
        f"{loss}: labels must be {span}, but {int(wrong.sum())} of {wrong.size} are "
        f"not; the first is {value!r} in {where}. {hint}"
    )


def _numbers_hint(given: TensorSpec) -> str:
    if given.dtype == TensorProto.STRING:
        return "; pass classes=[…] to encode class names as numbers"
    return f" of type {dtype_name(given.dtype)}"
