"""What the compiler knows of operators: their gradients, their simpler forms, and their opsets.

Owns: reverse-mode differentiation, whose rules are plugins (``ortflex_plugins/gradients``), and models
as protobuf before they are read as a :class:`~ortflex_core.compiler.model.model.Model`.

Add here: a helper that several gradient rules need (:mod:`~ortflex_core.compiler.operators.cotangents`), a
difference between two opsets (:mod:`~ortflex_core.compiler.operators.downgrade`).
"""
