"""Columns, labels, batches, pieces of large files, iterables, and the order of rows.

Owns: user data, from the arguments of ``fit`` to the batches of a step.

Add here: a form of labels (:mod:`~ortflex_core.compiler.problem.labels`). The order of rows is in
:mod:`~ortflex_core.kernel.batches` and :mod:`~ortflex_core.training.data.shuffle_buffer`.
The readers of file formats are plugins.
"""
