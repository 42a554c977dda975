"""Checkpoints as folders: written whole, read with every value checked.

Add here: a value that a checkpoint keeps (:mod:`~ortflex_core.training.checkpoints.record`).
"""
