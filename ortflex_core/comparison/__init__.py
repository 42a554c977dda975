"""One recipe on every backend, step by step, and where results differ.

May import: training and everything before it. The command ``ortflex compare`` prints it.
"""

from ortflex_core.comparison.comparison import Comparison, Result, compare

__all__ = ["Comparison", "Result", "compare"]
