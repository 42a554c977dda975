"""Which initializers are trained, and why; their initial values.

Owns: the choice of parameters from evidence, and the reason of every choice.

Add here: evidence for or against a parameter (:mod:`~ortflex_core.compiler.parameters.evidence`).
"""
