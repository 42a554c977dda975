"""Which initializers are trained, and why; their initial values.

Owns: the choice of parameters from evidence, and the reason of every choice.

May import: model and the packages before it.

Add here: evidence for or against a parameter (:mod:`~ortflex_core.parameters.evidence`).
"""

from ortflex_core.parameters.selection import choose_parameters

__all__ = ["choose_parameters"]
