"""The training problem in symbolic form: losses, penalties, groups of parameters, and updates.

Owns: the :class:`Problem`, which backends get.

May import: data, parameters, model and the packages before them.

Add here: a setting of the update (:mod:`~ortflex_core.problem.updating`), a key of ``groups``
(:mod:`~ortflex_core.problem.groups`).
"""

from ortflex_core.problem.losses import LossRequest, bind_terms, loss_tables
from ortflex_core.problem.problem import LossTerm, Problem
from ortflex_core.problem.updating import AVERAGE

__all__ = ["AVERAGE", "LossRequest", "LossTerm", "Problem", "bind_terms", "loss_tables"]
