"""The training problem in symbolic form: parameters, losses, penalties, groups, and updates.

Owns: the :class:`~ortflex_core.compiler.problem.problem.Problem`, which backends get; the choice of
parameters from evidence, with the reason of every choice; their initial values.

Add here: a setting of the update (:mod:`~ortflex_core.compiler.problem.updating`), a key of ``groups``
(:mod:`~ortflex_core.compiler.problem.groups`), evidence for or against a parameter
(:mod:`~ortflex_core.compiler.problem.parameter_evidence`).
"""
