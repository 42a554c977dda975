"""The display of training: its progress, its History, a summary, and its errors.

Owns: bars, lines, tables in terminals and notebooks, short tracebacks. It does not affect the
training.

May import: the flat modules of the core.

Add here: another display of one of these
(:mod:`~ortflex_core.views.progress`, :mod:`~ortflex_core.views.history`,
:mod:`~ortflex_core.views.summary`, :mod:`~ortflex_core.views.tracebacks`).
"""

from ortflex_core.views.history import History
from ortflex_core.views.progress import epoch_summary
from ortflex_core.views.summary import Summary
from ortflex_core.views.tables import text_table
from ortflex_core.views.tracebacks import short_traceback, short_tracebacks

__all__ = [
    "History",
    "Summary",
    "epoch_summary",
    "short_traceback",
    "short_tracebacks",
    "text_table",
]
