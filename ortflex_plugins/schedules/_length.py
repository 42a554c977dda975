"""Shared by schedules whose length is, by default, the length of the run."""

from __future__ import annotations

from typing import Any

import attrs

from ortflex_core import ConfigError, Progress, Schedule, number, setting


def length_field(what: str) -> Any:
    """A positive length in the unit of the schedule, or None for the whole run."""
    return setting(
        default=None,
        validator=attrs.validators.optional(number(gt=0)),
        help=f"{what}; by default, the whole run",
    )


def known_length(schedule: Schedule, name: str, progress: Progress) -> float:
    """The length in the field ``name`` of a schedule, or the length of the run.

    Raises:
        ConfigError: the field is None and the length of the run is unknown.
    """
    given: float | None = getattr(schedule, name)
    length = schedule.duration(progress) if given is None else given
    if length is None:
        raise ConfigError(
            f"{schedule.name}: {name}=None is the length of the run in units of {schedule.by!r}, "
            f"which is not known for this data source; set {name}="
        )
    return length
