"""Which nodes and parameters of a model can be trained, and by which backend, before there are data.

May import: training and the packages before it.

Add here: results of ``ortflex check`` about a model (:mod:`~ortflex_core.check.report` has its
form), or about the memory that training needs (:mod:`~ortflex_core.check.memory`).
"""

from ortflex_core.check.check import check_model
from ortflex_core.check.memory import MemoryReport, estimate_memory, mebibytes
from ortflex_core.check.report import ModelReport, NodeReport

__all__ = [
    "MemoryReport",
    "ModelReport",
    "NodeReport",
    "check_model",
    "estimate_memory",
    "mebibytes",
]
