"""Optimizers: the rule that updates a weight from its gradient."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import attrs

from ortflex_core.kernel.component import Component

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor
    from ortflex_core.kernel.host_scalars import Host

Slots: TypeAlias = "Mapping[str, Tensor]"
"""The state of an optimizer: tensors by the names of its slots."""
Updated: TypeAlias = "tuple[Tensor, Slots]"
"""A weight and its slots after a step."""


@attrs.frozen(kw_only=True)
class Optimizer(Component, abc.ABC):
    """An optimizer updates each weight w from its gradient g and the learning rate (``rate``).

    ``slots`` is the state of each weight: tensors of the weight's shape, unless :meth:`slot_shapes`
    defines others. ``shared`` is the state that all weights share (with groups of parameters, all weights
    of a group): tensors of shape []. All state is zero at the start.
    """

    default_rate: ClassVar[float] = 1e-3
    """The default learning rate."""
    slots: ClassVar[tuple[str, ...]] = ()
    shared: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = True
    """Whether an element's update depends on that element alone (lamb's does not)."""

    def slot_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The shape of every slot of a weight with the given shape; by default that of the weight.

        A weight may have only some of ``slots``, for example one mean per row for matrices and one
        per element for vectors.
        """
        return dict.fromkeys(self.slots, shape)

    def update_shared(
        self,
        op: Ops,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        rate: Host,
        step: Host,
        slots: Sequence[Slots],
        shared: Slots,
    ) -> Slots:
        """The new shared state, from all weights before the step.

        It is computed first; :meth:`update` of each weight then gets the new values with its slots.
        ``weights``, ``gradients`` and ``slots`` have an entry for every weight, and ``shared`` and
        the result tensors of shape [].
        """
        raise NotImplementedError(f"{type(self).__name__} has shared state but no update_shared")

    @abc.abstractmethod
    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The new weight and the new slots, with unchanged shapes.

        ``slots`` also contains the shared state, which must not be returned.

        ``rate`` and ``step`` are host scalars; ``step`` is 1 at the first update.
        """
