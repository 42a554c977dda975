"""Whether a schedule changes the learning rate, from its rates at some steps.

A portable step has no schedule: its rate is an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from ortflex_core.protocols import Schedule
from ortflex_core.types import Progress


class _Lines(Sequence[Mapping[str, float]]):
    """The lines of a History, which record whether they were read."""

    def __init__(self) -> None:
        self.seen = False

    def __len__(self) -> int:
        self.seen = True
        return 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # schedules made of others pass on a part of it
            return self
        self.seen = True
        raise IndexError(index)


def probe_schedule(schedule: Schedule, base: float, now: Progress) -> tuple[bool, bool]:
    """Whether a schedule changes the rate, and whether it reads the History for that.

    Args:
        schedule: the schedule, bound to its problem.
        base: the base learning rate.
        now: the progress of training.
    """
    lines = _Lines()
    rates = set()
    for count in (0, 1, 2, 5, 10, 100, 1000):
        later = attrs.evolve(
            now, step=count, epoch=count, rows=count, history=cast("Any", lines), epochs=1000
        )
        try:
            rates.add(schedule.rate(base, later))
        except Exception:  # a plugin may need something that does not exist here
            return True, lines.seen
    return len(rates) > 1 or lines.seen, lines.seen
