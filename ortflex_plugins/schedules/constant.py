"""The schedule ``constant``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core.protocols import Schedule
from ortflex_core.types import Progress


@attrs.frozen(kw_only=True)
class Constant(Schedule):
    """The base rate, always: ``rate(t) = base``.

    >>> Constant().rate(0.1, Progress(step=1000))
    0.1
    """

    name: ClassVar[str] = "constant"

    def rate(self, base: float, progress: Progress) -> float:
        """The base rate."""
        return base
