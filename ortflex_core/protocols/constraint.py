"""Constraints: where a weight may be."""

from __future__ import annotations

import abc

import attrs

from ortflex_core.component import Component
from ortflex_core.graph.ops import Ops, Tensor


@attrs.frozen(kw_only=True)
class Constraint(Component, abc.ABC):
    """Where a weight may be; it is put back there after every update."""

    @abc.abstractmethod
    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """The allowed weight that is nearest, of the same type and shape."""
