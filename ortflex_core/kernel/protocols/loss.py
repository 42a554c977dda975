"""Losses: the cost of one sample."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.types import Array, TensorSpec

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor


@attrs.frozen(kw_only=True)
class Loss(Component, abc.ABC):
    """The cost of one sample.

    ``per_sample`` returns values of shape [B, …]: the loss itself reduces class axes,
    but not batch and position axes, and it takes no mean. Under ``reduction="mean"`` the core
    computes Σ w·l / Σ w over all those values (w: sample weights times :meth:`mask`; in the
    denominator times :meth:`counts`), under ``"sum"`` Σ w·l.
    """

    scores: ClassVar[Literal["any", "raw"]] = "any"
    """"raw": the loss expects scores, so a final Softmax or Sigmoid is traced back to its input."""

    @property
    def needs_labels(self) -> bool:
        """Whether the formula reads labels; if not, ``expected`` is None in all its methods.

        Data may then have no labels. Labels that they have are for the metrics.
        """
        return True

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Type and shape of the labels for ``predicted``.

        ``given`` describes the user's labels if they are known, so that a loss can accept
        several forms (integers or one-hot). The result keeps ``predicted``'s symbolic dimensions.
        Labels are converted to this type once, and any other shape is refused.

        Raises:
            DataError: no form of the labels fits ``given``, or ``predicted`` does not fit the loss.
        """
        return attrs.evolve(predicted, name="expected")

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse label values outside the domain of the formula (once per array).

        Raises:
            DataError: the allowed range, the first bad row and its value.
        """

    @abc.abstractmethod
    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""

    def mask(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Factors (0 or 1) of the sample weights that depend only on the labels, or None."""
        return None

    def counts(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Factors of the sample weights in the denominator of the mean, or None.

        These are the mask, unless the loss weights values by their labels, as class weights do; None
        is 1.
        """
        return self.mask(op, expected)

    def gradient(
        self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor
    ) -> Tensor | None:
        """Gradient of Σ cotangent · per_sample with respect to ``predicted``.

        None, the default, lets the core differentiate :meth:`per_sample`. Define it only if it is
        more stable or smaller; ``cotangent`` has the shape of ``per_sample`` or broadcasts to it.
        """
        return None
