"""Transforms: changes of the gradients before the optimizer uses them."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.host_scalars import Host

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor


@attrs.frozen(kw_only=True)
class TransformContext:
    """The information that a transform can use in addition to the gradients."""

    weights: Mapping[str, Tensor]
    """The weights before the step, under the names of their gradients."""
    step: Host
    """The number of the update, a host scalar: 1 at the first."""
    scale: Host = attrs.field(default=Host.apply("Identity", 1.0))
    """A host scalar: the factor that is already in the gradients; 1 unless the transform is ``scaled``."""
    seed: int = 0
    """The seed of the training, for random numbers (``ortflex_core.compiler.graph.normal``)."""
    output_axes: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    """The output axes of the weights of matrix products, convolutions and recurrent layers, by name."""


@attrs.frozen(kw_only=True)
class Transform(Component, abc.ABC):
    """A transform changes the gradients of a step before the optimizer uses them.

    The gradients are those of loss and penalty, summed over the batches of the step; each has the type
    and the shape of its weight. Transforms are applied in the given order.
    """

    scaled: ClassVar[bool] = False
    """Whether the formula reads ``context.scale``; otherwise gradients are unscaled, and it is 1.

    With plain gradient descent, the fused backend includes the rate in the gradients, which saves a
    product per tensor. A transform T with this attribute satisfies T(s·g, scale=s) = s·T(g).
    """
    flat: ClassVar[bool] = False
    """Whether all gradients, and all weights, may be passed as one flat vector with one name."""

    @abc.abstractmethod
    def apply(
        self, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
    ) -> Mapping[str, Tensor]:
        """The gradients for the optimizer: the same names, types and shapes."""
