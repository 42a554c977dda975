"""The Trainer, its state, the loop, evaluation and checkpointing.

Owns: the only mutable state of the core.

May import: feed and the packages before it.

Add here: actions between steps (:mod:`~ortflex_core.training.loop`), methods of the Trainer
(:mod:`~ortflex_core.training.trainer`).
"""

from ortflex_core.training.internals import Internals, internals_of
from ortflex_core.views.progress import epoch_summary

__all__ = ["Internals", "epoch_summary", "internals_of"]
