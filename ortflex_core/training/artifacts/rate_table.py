"""The learning rates of a training as a table, which a portable step reads by its counter.

A portable step has no schedule, because a schedule is Python code. If the length of the training is
known, the step has the rates of all steps instead; otherwise its rate is an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from ortflex_core.kernel.calling import checked_rate
from ortflex_core.kernel.errors import ConfigError
from ortflex_core.kernel.step_protocols import Schedule
from ortflex_core.kernel.types import Array, Progress

LARGEST = 2**20
"""The largest number of rates in a table, which then has 8 MiB."""
_PROBED = (0, 1, 2, 5, 10, 100, 1000)

NEEDS_HISTORY = "it needs the History of the epochs"
NO_LENGTH = "the length of the training is not known"


@attrs.frozen(kw_only=True)
class Span:
    """The training whose rates a step has.

    Attributes:
        now: the progress before the first step that the files make.
        batch_rows: the rows of one step, except a shorter last step of an epoch.
    """

    now: Progress
    batch_rows: int

    @property
    def steps(self) -> int | None:
        """The number of steps; None if it is not known."""
        return self.now.total_steps

    def at(self, step: int, history: Sequence[Mapping[str, float]]) -> Progress:
        """The progress before a step, counted from the start of the training."""
        now, each = self.now, self.now.steps_per_epoch
        epoch, within = divmod(step, each) if each else (now.epoch, step)
        per_epoch = now.rows_per_epoch
        rows = step * self.batch_rows
        if per_epoch is not None and each:
            rows = epoch * per_epoch + min(within * self.batch_rows, per_epoch)
        return Progress(
            step=step,
            epoch=epoch,
            rows=rows,
            epochs=now.epochs,
            steps_per_epoch=each,
            rows_per_epoch=per_epoch,
            history=cast("Any", history),
        )


@attrs.frozen(kw_only=True, eq=False)
class RateTable:
    """The rates of a training: the rate of step ``t`` is ``values[min(t // interval, n − 1)]``.

    Attributes:
        values: n rates, in float64.
        interval: the number of steps with the same rate: 1, or the steps of an epoch.
        first: the value of the counter of finished steps at the start of the training.
    """

    values: Array
    interval: int
    first: int


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


def rate_table(
    schedule: Schedule, base: float, span: Span, counter: int
) -> tuple[RateTable | None, str]:
    """The rates of a training, and, if there is no table though the rate changes, the reason.

    Returns:
        A table and "", or None and a reason, which is "" if the rate is constant.
    """
    lines = _Lines()
    steps = span.steps
    if steps is None or (schedule.by == "epoch" and span.now.steps_per_epoch is None):
        return None, _probe(schedule, base, span.now, lines)
    interval = cast("int", span.now.steps_per_epoch) if schedule.by == "epoch" else 1
    count = max(1, -(-steps // interval))
    if count > LARGEST:
        if not (reason := _probe(schedule, base, span.now, lines)) or lines.seen:
            return None, reason
        raise ConfigError(
            f"schedule: a table of the {count:,} rates of {schedule.name!r} would be too large for a "
            f"portable step (at most {LARGEST:,}); let the schedule count epochs (by='epoch'), export "
            "a part of the training (epochs=), or export with schedule='constant' and pass "
            "the rate at every run"
        )
    values = np.empty(count)
    for k in range(count):
        try:
            values[k] = checked_rate(schedule, base, span.at(k * interval, lines))
        except Exception:
            if lines.seen:
                return None, NEEDS_HISTORY
            raise
        if lines.seen:
            return None, NEEDS_HISTORY
    if (values == values[0]).all():
        return None, ""
    return RateTable(values=values, interval=interval, first=counter - span.now.step), ""


def _probe(schedule: Schedule, base: float, now: Progress, lines: _Lines) -> str:
    """Why a schedule changes the rate, from its rates at some steps; "" if it does not."""
    rates = set()
    for count in _PROBED:
        later = attrs.evolve(
            now, step=count, epoch=count, rows=count, history=cast("Any", lines), epochs=1000
        )
        try:
            rates.add(schedule.rate(base, later))
        except Exception:  # it may need a length that does not exist here
            rates |= {-1.0, -2.0}
            break
    if lines.seen:
        return NEEDS_HISTORY
    return NO_LENGTH if len(rates) > 1 else ""
