"""A problem as programs: loss, gradient, update, evaluation, or a whole step in one graph.

Owns: the graphs to compile. Every backend runs these programs or parts of them.

May import: problem and the packages before it.

Add here: a stage of a step (:mod:`~ortflex_core.programs.stages`, :mod:`~ortflex_core.programs.updates`),
a pattern that makes graphs smaller (:mod:`~ortflex_core.programs.patterns`).
"""

from ortflex_core.programs.cache_key import problem_key
from ortflex_core.programs.formulas import Formula
from ortflex_core.programs.rebuild import optimize
from ortflex_core.programs.stages import forward_program, loss_program, training_program
from ortflex_core.programs.step import NORM, gradient_program, step_program, update_program
from ortflex_core.programs.updates import adding_program, batch_gradient, global_norm

__all__ = [
    "NORM",
    "Formula",
    "adding_program",
    "batch_gradient",
    "forward_program",
    "global_norm",
    "gradient_program",
    "loss_program",
    "optimize",
    "problem_key",
    "step_program",
    "training_program",
    "update_program",
]
