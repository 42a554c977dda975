"""Constraints: the values that a weight may take."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import attrs

from ortflex_core.kernel.component import Component

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor


@attrs.frozen(kw_only=True)
class Constraint(Component, abc.ABC):
    """A constraint projects each weight onto a set of allowed values after every update."""

    @abc.abstractmethod
    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """The nearest allowed weight, of the same type and shape."""
