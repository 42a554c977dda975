"""User data on their way to the loop: opened, labels encoded, converted to the types of the graphs.

May import: checkpoints and the packages before it.

Add here: another form of data that ``fit`` takes (:mod:`~ortflex_core.feed.opening` for all rows at once,
:mod:`~ortflex_core.feed.feed` for batches), another form of labels (:mod:`~ortflex_core.feed.labels`).
"""
