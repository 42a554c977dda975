"""All kinds of plugins by one path; ``ortflex_core.protocols`` has the same names."""

from ortflex_core import protocols
from ortflex_core.protocols import *  # noqa: F403

__all__ = protocols.__all__
