"""Operators and opsets: function bodies, kernels, and conversion between opsets.

Owns: models as protobuf, before they are read as a :class:`~ortflex_core.compiler.model.Model`.

Add here: a difference between two opsets (:mod:`~ortflex_core.compiler.opsets.downgrade`).
"""
