"""Compare the results and the times of a recipe on every backend.

May import: training and everything before it. The command ``ortflex compare`` prints it.
"""

from ortflex_core.comparison.comparison import Comparison, Result, compare
from ortflex_core.comparison.times import Times, time_backends

__all__ = ["Comparison", "Result", "Times", "compare", "time_backends"]
