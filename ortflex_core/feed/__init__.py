"""User data on their way to the loop: opened, labels encoded, converted to the types of the graphs.

May import: checkpoints and the packages before it.

Add here: a new form of data for ``fit`` (:mod:`~ortflex_core.feed.opening` for all rows at once,
:mod:`~ortflex_core.feed.feed` for batches), a new form of labels
(:mod:`~ortflex_core.feed.labels`).
"""
