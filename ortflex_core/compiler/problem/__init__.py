"""The training problem in symbolic form: losses, penalties, groups of parameters, and updates.

Owns: the :class:`Problem`, which backends get.

Add here: a setting of the update (:mod:`~ortflex_core.compiler.problem.updating`), a key of ``groups``
(:mod:`~ortflex_core.compiler.problem.groups`).
"""
