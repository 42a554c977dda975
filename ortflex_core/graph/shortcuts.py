"""What gradient rules know of a whole step that makes it cheaper, for graphs that hold the step.

A rule sees one node. What its gradient needs may give the node's own output at no further cost, or
in a form that the next rule could use as it is; both are written down here, and whoever finds
nothing written does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from ortflex_core.graph.ops import Tensor


@attrs.frozen
class Shortcuts:
    """Notes beside a trace, by tensor.

    Attributes:
        instead: what a value may be taken from in the finished graph: the same values to rounding,
            made without it.
        parts: what a cotangent was put together from.
    """

    instead: dict[Tensor, Tensor] = attrs.field(factory=dict)
    parts: dict[Tensor, Any] = attrs.field(factory=dict)
