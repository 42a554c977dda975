"""The loss ``cosine_embedding``."""

from __future__ import annotations

from typing import ClassVar

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
    float_scores,
    hyper,
    number,
    require_range,
    shape_mismatch,
)

_EPS = 1e-12  # torch's, added to squared lengths


@attrs.frozen(kw_only=True)
class CosineEmbedding(Loss):
    """Cosine embedding loss: ``1 − cos`` for similar pairs, ``max(0, cos − margin)`` for dissimilar ones.

    For predictions [B, D], the labels [B, D] are the target embeddings, and ``l = 1 − cos(p, y)``.
    Predictions [B, 2, D] are pairs of embeddings, such as two outputs that the model stacks. Their
    labels [B] are 1 for similar pairs, with ``l = 1 − cos``, and −1 for dissimilar pairs, with
    ``l = max(0, cos − margin)``. The loss values have the shape [B], and
    ``cos(a, b) = a·b / √((‖a‖² + 1e-12)·(‖b‖² + 1e-12))``.

    Raises:
        ValueError: ``margin`` is not in [−1, 1].
        DataError: the labels have another shape or, for pairs, other values than −1 and 1.

    >>> CosineEmbedding(margin=0.5).describe()
    {'name': 'cosine_embedding', 'margin': 0.5}

    Source: torch.nn.CosineEmbeddingLoss(reduction="none").
    """

    name: ClassVar[str] = "cosine_embedding"

    margin: float = hyper(
        default=0.0,
        validator=number(ge=-1, le=1),
        help="the cosine above which dissimilar pairs have a positive loss",
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
            dissimilar = np.asarray(labels == -1)
            require_range(self.name, labels, 1, 1, allowed=dissimilar, hint=hint)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        if predicted.rank == 2:
            return 1 - _cosine(op, predicted, expected)
        one, other = (op.Gather(predicted, op.constant(k), axis=1) for k in (0, 1))
        cosine = _cosine(op, one, other)
        return op.Where(expected > 0, 1 - cosine, op.Relu(cosine - self.margin))


def _cosine(op: Ops, one: Tensor, other: Tensor) -> Tensor:
    """The cosine of each row of a tensor [B, D] with the row of another one."""
    product, *lengths = (
        op.ReduceSum(a * b, axes=[1], keepdims=0)
        for a, b in ((one, other), (one, one), (other, other))
    )
    # A root of each length: the product of two squared lengths could exceed 1e38, the end of float32.
    return product / (op.Sqrt(lengths[0] + _EPS) * op.Sqrt(lengths[1] + _EPS))
