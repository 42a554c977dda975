"""The schedule ``constant``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Progress, Schedule, Unit, one_of


@attrs.frozen(kw_only=True)
class Constant(Schedule):
    """The base rate at all times: ``rate(t) = base``.

    >>> Constant().rate(0.1, Progress(step=1000))
    0.1
    """

    name: ClassVar[str] = "constant"

    # With "epoch", the loop computes the rate only once per epoch.
    by: Unit = attrs.field(default="epoch", validator=one_of("step", "epoch", "rows"))

    def rate(self, base: float, progress: Progress) -> float:
        """The base rate."""
        return base
