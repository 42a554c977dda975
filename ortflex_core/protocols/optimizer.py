"""Optimizers: how a weight moves along its gradient."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core.component import Component
from ortflex_core.graph.host_scalars import Host
from ortflex_core.graph.ops import Ops, Tensor


@attrs.frozen(kw_only=True)
class Optimizer(Component, abc.ABC):
    """How a weight moves along its gradient.

    ``slots`` is the state that belongs to each weight: tensors of the weight's shape, all zero
    at the start.
    """

    default_rate: ClassVar[float] = 1e-3
    """The learning rate when the user names none."""
    slots: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = True
    """Whether an element's update depends on that element alone (lamb's does not)."""

    @abc.abstractmethod
    def update(
        self,
        op: Ops,
        weight: Tensor,
        gradient: Tensor,
        rate: Host,
        step: Host,
        slots: Mapping[str, Tensor],
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The new weight and the new slots.

        ``rate`` and ``step`` are host scalars; ``step`` is 1 at the first update.
        """
