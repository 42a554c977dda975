"""The reverse walk over a graph, the tables of gradient rules, and helpers for rules.

Owns: the computation of gradients. The rules themselves are plugins
(``ortflex_plugins/gradients``).

Add here: a helper that several rules need (:mod:`~ortflex_core.compiler.autodiff.cotangents`).
"""
