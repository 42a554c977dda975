"""The loss ``cosine_embedding``."""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np

from ortflex_core.component import hyper, number
from ortflex_core.data import float_labels, float_scores, require_range, shape_mismatch
from ortflex_core.errors import DataError
from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Loss
from ortflex_core.types import Array, TensorSpec

_EPS = 1e-12  # torch's, added to squared lengths


@attrs.frozen(kw_only=True)
class CosineEmbedding(Loss):
    """Cosine distance of two embeddings: ``1 − cos`` for similar pairs, cosines above a margin for others.

    Either the labels are the embeddings that the predictions [B, D] should be like:
    ``l = 1 − cos(p, y)``. Or the prediction is a pair a row, [B, 2, D] (two outputs, stacked in the
    model), and labels [B] are 1 for those that belong together, ``l = 1 − cos``, and −1 for the
    others, ``l = max(0, cos − margin)``. The values have the shape [B];
    ``cos(a, b) = a·b / √((‖a‖² + 1e-12)·(‖b‖² + 1e-12))``.

    Raises:
        ValueError: ``margin`` is not in [−1, 1].
        DataError: labels of another shape, or other than −1 and 1 for pairs.

    >>> CosineEmbedding(margin=0.5).describe()
    {'name': 'cosine_embedding', 'margin': 0.5}

    Source: torch.nn.CosineEmbeddingLoss before its reduction.
    """

    name: ClassVar[str] = "cosine_embedding"

    margin: float = hyper(
        default=0.0,
        validator=number(ge=-1, le=1),
        help="the cosine above which dissimilar pairs have a loss",
    )

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Embeddings of the prediction's shape, or a number for each pair."""
        float_scores(self.name, predicted)
        shape = predicted.shape
        if shape is not None and len(shape) == 2:
            return float_labels(self.name, predicted, given)
        if shape is None or len(shape) != 3 or (isinstance(shape[1], int) and shape[1] != 2):
            raise DataError(
                "cosine_embedding expects embeddings [B, D] or pairs of embeddings [B, 2, D], "
                f"got {predicted}"
            )
        wanted = TensorSpec("expected", predicted.dtype, shape[:1])
        if given is not None and given.shape is not None and len(given.shape) != 1:
            raise DataError(shape_mismatch(self.name, wanted, given))
        return float_labels(self.name, wanted, given)

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels other than −1 and 1 for pairs."""
        if labels.ndim == 1:
            hint = "1 marks similar pairs, -1 dissimilar ones."
            apart = np.asarray(labels == -1)
            require_range(self.name, labels, 1, 1, allowed=apart, hint=hint)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""
        if predicted.rank == 2:
            return 1 - _cosine(op, predicted, expected)
        one, other = (op.Gather(predicted, op.constant(k), axis=1) for k in (0, 1))
        cosine = _cosine(op, one, other)
        return op.Where(expected > 0, 1 - cosine, op.Relu(cosine - self.margin))


def _cosine(op: Ops, one: Tensor, other: Tensor) -> Tensor:
    """Of the rows of two tables [B, D]."""
    product, *lengths = (
        op.ReduceSum(a * b, axes=[1], keepdims=0)
        for a, b in ((one, other), (one, one), (other, other))
    )
    # The root of each: in float32 the product of two squared lengths ends at 1e38.
    return product / (op.Sqrt(lengths[0] + _EPS) * op.Sqrt(lengths[1] + _EPS))
