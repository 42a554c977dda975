"""Losses: the cost of one sample."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

import attrs

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.types import Array, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import typing_extensions

    from ortflex_core.compiler.graph.ops import Ops, Tensor
    from ortflex_core.compiler.problem.teachers import TeacherTensor

    P = typing_extensions.TypeVar("P", default=Tensor)
    S = typing_extensions.TypeVar("S", default=TensorSpec)
else:
    P, S = TypeVar("P"), TypeVar("S")


@attrs.frozen(kw_only=True)
class Loss(Component, abc.ABC, Generic[P, S]):
    """A loss measures the error of the model's predictions.

    ``per_sample`` returns values l of shape [B, …]: the loss itself reduces the class axes, but not
    the batch and position axes, and it takes no mean. With ``reduction="mean"``, the core computes
    Σ w·l / Σ w over all these values, where w is the sample weight times :meth:`mask` in the numerator,
    and times :meth:`counts` in the denominator. With ``"sum"``, it computes Σ w·l.
    """

    scores: ClassVar[Literal["any", "raw"]] = "any"
    """"raw": the loss expects logits, so a final Softmax or Sigmoid is traced back to its input."""
    tensors: ClassVar[tuple[str, ...]] = ()
    """Names of several tensors to read; ``predicted`` is then a mapping from them in all methods."""
    columns: ClassVar[tuple[str, ...]] = ()
    """The :attr:`tensors` that may be left out, or be a column of integers [B] next to the inputs."""
    one_model: ClassVar[bool] = False
    """Whether one model may compute all :attr:`tensors`, each from separate inputs (``positive/x``)."""
    draws: ClassVar[tuple[str, ...]] = ()
    """The :attr:`tensors` that :attr:`one_model` computes from a second augmentation of the same rows."""

    @property
    def needs_labels(self) -> bool:
        """Whether the formula reads labels; if not, ``expected`` is None, and labels are for metrics."""
        return True

    def parameters(
        self, predicted: Mapping[str, TensorSpec], generator: np.random.Generator
    ) -> Mapping[str, Array]:
        """Initial values of the loss's own trained tensors, by name; exports do not contain them."""
        return {}

    @property
    def taught(self) -> TeacherTensor | None:
        """A teacher's tensor; the formula gets a mapping with the keys ``predicted`` and ``teacher``."""
        return None

    def label(self, predicted: S, given: TensorSpec | None) -> TensorSpec:
        """Type and shape of the labels for ``predicted``.

        ``given`` describes the user's labels if they are known, so that a loss can accept
        several forms (integers or one-hot). The result keeps ``predicted``'s symbolic dimensions.
        Labels are converted to this type once, and any other shape is refused.

        Raises:
            DataError: no form of the labels fits ``given``, or ``predicted`` does not fit the loss.
        """
        first = next(iter(predicted.values())) if isinstance(predicted, Mapping) else predicted
        assert isinstance(first, TensorSpec)
        return attrs.evolve(first, name="expected")

    def check_labels(self, predicted: S, labels: Array) -> None:
        """Refuse label values outside the domain of the formula (once per array).

        Raises:
            DataError: a label is not allowed; the message has the range, the first bad row and its value.
        """

    counted: ClassVar[tuple[str, ...]] = ()
    """Fields whose value may be the name of a rule, which :meth:`fitted` replaces before training."""

    def fitted(self, predicted: S, labels: Array) -> Loss[P, S]:
        """The loss with values in place of its rules, computed from all training ``labels``."""
        return self

    def check_column(self, predicted: S, name: str, values: Array) -> None:
        """Refuse values of one of :attr:`columns`, as :meth:`check_labels` does."""

    @abc.abstractmethod
    def per_sample(self, op: Ops, predicted: P, expected: Tensor) -> Tensor:
        """The formula."""

    def mask(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Factors (0 or 1) of the sample weights that depend only on the labels, or None."""
        return None

    def counts(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Factors of the sample weights in the denominator of the mean, or None.

        They equal the mask unless the loss weights values by their labels, as class weights do. None
        means 1.
        """
        return self.mask(op, expected)

    def gradient(self, op: Ops, predicted: P, expected: Tensor, cotangent: Tensor) -> P | None:
        """Gradient of Σ cotangent · per_sample with respect to ``predicted``.

        None, the default, lets the core differentiate :meth:`per_sample`. Define it only if it is
        more stable or smaller; ``cotangent`` has the shape of ``per_sample`` or broadcasts to it.
        """
        return None

    def predictions(self, predicted: Mapping[str, Array]) -> Array:
        """The array that metrics read, for a loss with :attr:`tensors`: by default the first tensor."""
        return predicted[self.tensors[0]]
