"""Adapters in a model: where they may be attached, the graph that has them, and the file without them.

Owns: the products of a model that adapters may be attached to, and :class:`AdaptedModel`, which
later packages train like any other model.

May import: parameters and the packages before it.

Add here: an operator that is a product (:mod:`~ortflex_core.adapters.products`).
"""

from ortflex_core.adapters.adapted_model import AdaptedModel, adapt, frozen_values, with_values
from ortflex_core.adapters.portable import write_adapter, write_base
from ortflex_core.adapters.products import find_products

__all__ = [
    "AdaptedModel",
    "adapt",
    "find_products",
    "frozen_values",
    "with_values",
    "write_adapter",
    "write_base",
]
