"""Operators and opsets: function bodies, kernels, shape inference, and conversion between opsets.

Owns: models as protobuf, before they are read as a :class:`~ortflex_core.model.Model`.

May import: the flat modules, graph, protocols and runtime.

Add here: a difference between two opsets (:mod:`~ortflex_core.opsets.downgrade`).
"""

from ortflex_core.opsets.function_bodies import body_of, has_body

__all__ = ["body_of", "has_body"]
