"""A problem as programs: loss, gradient, update, evaluation, or a whole step in one graph.

Owns: the graphs to compile. Every backend runs these programs or parts of them.

Add here: a stage of a step (:mod:`~ortflex_core.compiler.programs.stages`,
:mod:`~ortflex_core.compiler.programs.updates`),
a pattern that makes graphs smaller (:mod:`~ortflex_core.compiler.programs.patterns`).
"""
