"""Penalties: the cost of a weight."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from ortflex_core.kernel.component import Component

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor


@attrs.frozen(kw_only=True)
class Penalty(Component, abc.ABC):
    """A penalty regularizes the weights. It is added to the reduced loss once per step."""

    unnamed: ClassVar[Mapping[str, float] | None] = None
    """The default parameters if a recipe table without ``name`` means this penalty; otherwise None."""

    @abc.abstractmethod
    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """The cost of every element, of the weight's shape; None is 0."""

    def per_tensor(self, op: Ops, weight: Tensor) -> Tensor | None:
        """The cost of a whole weight, or of its rows, in any shape; it is summed. None, the default, is 0.

        It is added to the cost of the elements.
        """
        return None

    def gradient(self, op: Ops, weight: Tensor) -> Tensor | None:
        """Gradient of the summed cost; None, the default, lets the core differentiate."""
        return None
