"""Adapters in a model: where they may be attached, the graph that has them, and the file without them.

Owns: the products of a model that adapters may be attached to, and :class:`AdaptedModel`, which
later packages train like any other model.

Add here: an operator that is a product (:mod:`~ortflex_core.compiler.model.products`).
"""
