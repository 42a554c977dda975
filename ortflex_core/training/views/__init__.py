"""The display of training: its progress, its History, a summary, and its errors.

Owns: bars, lines, tables in terminals and notebooks, short tracebacks. It does not affect the
training.

Add here: another display of one of these
(:mod:`~ortflex_core.training.views.progress`, :mod:`~ortflex_core.training.views.history`,
:mod:`~ortflex_core.training.views.summary`, :mod:`~ortflex_core.kernel.tracebacks`).
"""
