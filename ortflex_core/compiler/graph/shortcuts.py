"""Notes by which gradient rules share intermediate results, in graphs that hold a whole step.

A rule handles one node. The tensors that its gradient needs may also give the node's output at no
further cost, or have a form that the next rule can use directly. Both facts are recorded here;
without a record, a rule computes everything itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Tensor


@attrs.frozen
class Shortcuts:
    """Notes on a trace, by tensor.

    ``instead`` has a tensor that may replace this one in the finished graph: equal up to rounding, and
    computed without it. ``parts`` are the tensors that a cotangent was assembled from.
    """

    instead: dict[Tensor, Tensor] = attrs.field(factory=dict)
    parts: dict[Tensor, Any] = attrs.field(factory=dict)
