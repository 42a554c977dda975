"""The position of a run, which a checkpoint records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from ortflex_core.kernel.types import Progress


@attrs.frozen(kw_only=True)
class Position:
    """The position where training stopped, from which a loop continues as without the stop.

    ``progress`` counts whole steps and whole epochs; ``steps`` counts those of the unfinished epoch,
    with the number of their ``rows`` and the sums of their costs. ``records`` are the finished
    lines of the History; ``at_once`` is the number of steps per call of the engine; ``data`` is
    the position that the source reports; ``stopped`` says whether a hook ended training after an
    epoch; ``apart`` is the number of processes that trained separately (``sync_every``).
    """

    progress: Progress
    steps: int = 0
    rows: int = 0
    loss: float = 0.0
    penalty: float = 0.0
    losses: tuple[float, ...] = ()
    seconds: float = 0.0
    rate: float = math.nan
    records: tuple[Mapping[str, float], ...] = ()
    seed: tuple[int, ...] = (0,)
    at_once: int = 1
    stopped: bool = False
    data: Mapping[str, Any] | None = None
    apart: int = 1
