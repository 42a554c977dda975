"""What schedules made of others share: the others, and the time as they see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ortflex_core.component import setting
from ortflex_core.errors import ConfigError
from ortflex_core.protocols import Schedule, Unit
from ortflex_core.types import Progress


def schedules_field() -> Any:
    """The field ``schedules``: one or more, all counting by the unit of the whole."""
    return setting(
        converter=tuple, validator=_check, help="names, or tables with the key name and parameters"
    )


def _check(instance: Any, attribute: attrs.Attribute[Any], value: Sequence[Any]) -> None:
    where = f"{type(instance).__name__}.{attribute.name}"
    if not value:
        raise ValueError(f"{where} must be at least one schedule, got none")
    for schedule in value:
        if not isinstance(schedule, Schedule):
            raise TypeError(f"{where} must be schedules, got {schedule!r}")
        same_unit(instance, schedule)


def same_unit(whole: Schedule, part: Schedule) -> None:
    """Refuse a part that counts by another unit than the whole.

    Raises:
        ConfigError: the two units.
    """
    if part.by != whole.by:
        raise ConfigError(
            f"{whole.name} counts by {whole.by!r} and its schedule {part.name!r} by {part.by!r}; "
            "use the same by= for both"
        )


def since(by: Unit, progress: Progress, start: int, end: int | None, total: int | None) -> Progress:
    """The progress as a schedule sees it that begins at a time and lasts until another.

    Args:
        by: the unit in which everything here is counted.
        progress: of the whole training.
        start: when the schedule begins; before, its time is 0.
        end: when it ends; None is the end of the training.
        total: how long the training is; None if unknown.
    """
    until = total if end is None else end
    left = None if until is None else max(0, until - start)
    # A total of steps or rows is a product with the epochs: one epoch holds it all.
    epochs = progress.epochs if left is None else 1
    if by == "step":
        time = max(0, progress.step - start)
        return attrs.evolve(progress, step=time, steps_per_epoch=left, epochs=epochs)
    if by == "rows":
        time = max(0, progress.rows - start)
        return attrs.evolve(progress, rows=time, rows_per_epoch=left, epochs=epochs)
    time = max(0, progress.epoch - start)
    return attrs.evolve(progress, epoch=time, epochs=left, history=progress.history[start:])
