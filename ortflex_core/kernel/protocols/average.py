"""Averages: means of the weights over the training."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import attrs

from ortflex_core.kernel.component import Component

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor
    from ortflex_core.kernel.host_scalars import Host


@attrs.frozen(kw_only=True)
class Average(Component, abc.ABC):
    """An average is a mean of the weights over many steps, for use in predictions and exports.

    A running mean overrides ``share``, anything else ``update``.
    """

    def share(self, op: Ops, step: Host) -> Host | float | None:
        """The fraction of the weight in a running mean: ``a ← a + share · (w − a)``.

        ``step`` is a host scalar, 1 at the first update. The result must also be a host scalar, from
        0 to 1. None (the default): the average is not a running mean, and overrides :meth:`update`.
        """
        return None

    def update(self, op: Ops, average: Tensor, weight: Tensor, step: Host) -> Tensor:
        """The average after a step."""
        share = self.share(op, step)
        if share is None:
            raise NotImplementedError(f"{type(self).__name__} overrides neither share nor update")
        return average + share * (weight - average)
