"""The penalty ``none``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Penalty


@attrs.frozen(kw_only=True)
class NoPenalty(Penalty):
    """No penalty; the graph gets no node.

    >>> NoPenalty().describe()
    {'name': 'none'}
    """

    name: ClassVar[str] = "none"

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """None: no element has a cost."""
        return None
