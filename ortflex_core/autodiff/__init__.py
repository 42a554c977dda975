"""The reverse walk over a graph, the tables of gradient rules, and helpers for rules.

Owns: the computation of gradients. The rules themselves are plugins
(``ortflex_plugins/gradients``).

May import: the flat modules, graph, protocols, runtime and opsets.

Add here: a helper that several rules need (:mod:`~ortflex_core.autodiff.cotangents`).
"""

from ortflex_core.autodiff.cotangents import (
    add_at,
    full,
    passed,
    positions,
    put_back,
    ranked,
    reshape_like,
    unbroadcast,
    zeros_like,
)
from ortflex_core.autodiff.families import load_rules
from ortflex_core.autodiff.reverse import NodeView, gradients
from ortflex_core.autodiff.rules import Gradient, Rules, RuleTable
from ortflex_core.graph.sizes import dims

__all__ = [
    "Gradient",
    "NodeView",
    "RuleTable",
    "Rules",
    "add_at",
    "dims",
    "full",
    "gradients",
    "load_rules",
    "passed",
    "positions",
    "put_back",
    "ranked",
    "reshape_like",
    "unbroadcast",
    "zeros_like",
]
