"""The Trainer, its state, the loop, evaluation and checkpointing.

Owns: the only mutable state of the core.

Add here: actions between steps (:mod:`~ortflex_core.kernel.loop`), methods of the Trainer
(:mod:`~ortflex_core.training.trainer`).
"""

from ortflex_core.kernel.moved import forwarding

__getattr__ = forwarding(__name__)
