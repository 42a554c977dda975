"""The penalty ``none``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Ops, Penalty, Tensor


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
