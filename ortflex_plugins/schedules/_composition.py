"""Shared by schedules that are made of others: their field, and the time as each part counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ortflex_core import ConfigError, Progress, Schedule, Unit, setting


def schedules_field() -> Any:
    """The field ``schedules``: at least one schedule, all in the unit of the composition."""
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


def same_unit(composition: Schedule, part: Schedule) -> None:
    """Refuse a part that counts by another unit than the composition.

    Raises:
        ConfigError: names the two units.
    """
    if part.by != composition.by:
        raise ConfigError(
            f"{composition.name} counts by {composition.by!r} and its schedule {part.name!r} by "
            f"{part.by!r}; use the same by= for both"
        )


def since(by: Unit, progress: Progress, start: int, end: int | None, total: int | None) -> Progress:
    """The progress for a part, a schedule that begins and ends at given times.

    Args:
        by: the unit of all times.
        progress: the progress of the whole training.
        start: when the part begins; before that, its time is 0.
        end: when the part ends; None is the end of the training.
        total: the length of the run; None if it is unknown.
    """
    until = total if end is None else end
    length = None if until is None else max(0, until - start)
    # The length in steps or rows is a number per epoch times the epochs: here it is one epoch.
    epochs = progress.epochs if length is None else 1
    if by == "step":
        time = max(0, progress.step - start)
        return attrs.evolve(progress, step=time, steps_per_epoch=length, epochs=epochs)
    if by == "rows":
        time = max(0, progress.rows - start)
        return attrs.evolve(progress, rows=time, rows_per_epoch=length, epochs=epochs)
    time = max(0, progress.epoch - start)
    return attrs.evolve(progress, epoch=time, epochs=length, history=progress.history[start:])
