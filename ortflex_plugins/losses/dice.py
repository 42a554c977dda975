"""The loss ``dice``: how little two regions overlap."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
from onnx import TensorProto

from ortflex_core import (
    Array,
    DataError,
    Loss,
    Ops,
    Tensor,
    TensorSpec,
    float_labels,
    hyper,
    number,
    one_of,
    require_range,
    setting,
)
from ortflex_plugins.losses._classes import class_labels, is_class


@attrs.frozen(kw_only=True)
class Dice(Loss):
    """Soft Dice loss: ``1 − (2·Σ p·y + smooth) / (Σ p + Σ y + smooth)``, with sums over the positions.

    Logits ``s`` have the shape [B, C, …]: one channel per region, followed by the positions. The loss
    values then have the shape [B, C]. Logits [B, N] describe a single region with N positions, and
    the loss values have the shape [B].

    With ``over="regions"``, each region is predicted separately by ``p = sigmoid(s)``, and the labels
    are in [0, 1] and have the shape of the logits. With ``over="classes"``, every position belongs to
    one class, ``p = softmax(s)`` along axis 1, and the labels are class indices [B, …] or class
    probabilities in the shape of the logits.

    Raises:
        ValueError: ``over`` has another value, or ``smooth`` is not positive.
        DataError: the labels have another shape or type or are outside their range, or the logits have no
            positions.

    >>> Dice(smooth=1.0).describe()
    {'name': 'dice', 'over': 'regions', 'smooth': 1.0}

    Source: F. Milletari, N. Navab and S.-A. Ahmadi, "V-Net" (2016); MONAI's DiceLoss with
    ``sigmoid=True`` or ``softmax=True``, before averaging.
    """

    name: ClassVar[str] = "dice"
    scores: ClassVar[Literal["any", "raw"]] = "raw"

    over: Literal["regions", "classes"] = setting(
        default="regions",
        validator=one_of("regions", "classes"),
        help="what the labels describe: ``regions``, which may overlap, or ``classes``, one for each "
        "position",
    )
    smooth: float = hyper(
        default=1e-5,
        validator=number(gt=0),
        help="the number added to the numerator and the denominator, so that an empty prediction of "
        "an empty region has a loss of 0",
    )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Labels of the scores' shape, or class indices without the class axis."""
        shape, least = predicted.shape, 2 if self.over == "regions" else 3
        if shape is None or len(shape) < least:
            wanted = "[B, N] or [B, C, …]" if self.over == "regions" else "[B, C, …]"
            raise DataError(
                f"dice over {self.over} expects scores {wanted} with the positions last, got "
                f"{predicted}"
            )
        if self.over == "regions":
            return float_labels(self.name, predicted, given)
        return class_labels(self.name, predicted, given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse fractions outside [0, 1] and class indices outside 0 … C−1."""
        count = predicted.shape[1] if predicted.shape is not None else None
        numbers = labels.dtype.kind in "iu"
        last = 1 if not numbers else count - 1 if isinstance(count, int) else None
        hint = (
            "They are class indices."
            if numbers
            else "They say how much of each position belongs to the region."
        )
        require_range(self.name, labels, 0, last, hint=hint)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        regions = self.over == "regions"
        probability = op.Sigmoid(predicted) if regions else op.Softmax(predicted, axis=1)
        if expected.dtype == TensorProto.INT64:
            expected = op.Cast(is_class(op, predicted, expected), to=predicted.dtype)
        rank = predicted.rank or 2  # label() refuses scores of unknown rank
        axes = list(range(min(2, rank - 1), rank))
        overlap, found, labeled = (
            op.ReduceSum(region, axes=axes, keepdims=0)
            for region in (probability * expected, probability, expected)
        )
        return 1 - (2 * overlap + self.smooth) / (found + labeled + self.smooth)
