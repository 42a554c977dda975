"""Checkpoints as folders: written whole, read with every value checked.

May import: config and the packages before it.

Add here: a value that a checkpoint keeps (:mod:`~ortflex_core.checkpoints.record`).
"""

from ortflex_core.checkpoints.checkpoint import Saved, list_checkpoints

__all__ = ["Saved", "list_checkpoints"]
