"""The interfaces of all kinds of plugins: required methods and guarantees of the core. Read this first.

Owns: the base classes of losses, penalties, adapters, transforms, optimizers, constraints, averages,
schedules, precisions, metrics, data sources, devices, backends and process groups. The tables of
gradient rules and decompositions are in :mod:`~ortflex_core.compiler.operators.gradient_rules` and
:mod:`~ortflex_core.compiler.operators.decomposition_table`. Formulas are called through
:mod:`~ortflex_core.compiler.graph.formula_calls`, which checks what they return.

Add here: a new kind of plugin, in a new file that gets a line in :mod:`ortflex_core.kernel.kinds`; or a
method of a kind.
"""
