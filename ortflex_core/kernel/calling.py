"""Calls of the code of plugins: an error names the plugin and its distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ortflex_core.kernel.entries import OURS, Entry, singular
from ortflex_core.kernel.errors import (
    BrokenPlugin,
    ConfigError,
    GraphError,
    OrtflexError,
    describe_error,
)
from ortflex_core.kernel.plugin_trace import traced
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Progress

if TYPE_CHECKING:
    from ortflex_core.kernel.step_protocols import Schedule


def _entry_of(component: object) -> Entry | None:
    """The entry point of a component, which only error messages need."""
    plugins = Plugins.discover()
    return plugins[plugins.kind_of(component)].entry_of(component)


def whose(component: object) -> str:
    """The name of a component in error messages: ``the loss 'cubed' (cube:Cubed, from cube 1.0)``."""
    entry = _entry_of(component)
    if entry is not None:
        return entry.described
    cls = type(component)
    return (
        f"the {singular(Plugins.discover().kind_of(component))} {cls.__module__}.{cls.__qualname__}"
    )


@contextmanager
def calling(component: object, method: str) -> Iterator[None]:
    """Name a component and its owner in errors of its code: BrokenPlugin, or GraphError for its formula."""
    try:
        with traced(method, lambda: whose(component)):
            yield
    except KeyboardInterrupt:
        raise
    except OrtflexError as error:
        entry = _entry_of(component)
        if type(error) is not GraphError or (entry is not None and entry.owner == OURS):
            raise
        raise GraphError(f"{whose(component)} fails in {method}: {error}") from error
    except BaseException as error:
        raise BrokenPlugin(
            f"{whose(component)} fails in {method}: {describe_error(error)}", component
        ) from error


def checked_rate(schedule: Schedule, base: float, progress: Progress) -> float:
    """The learning rate of the step that comes after ``progress``: a finite number that is not negative."""
    try:
        value = schedule.rate(base, progress)
        good = math.isfinite(value) and value >= 0
    except (OrtflexError, KeyboardInterrupt):
        raise
    except BaseException as error:
        wanted = "expected a finite number >= 0"
        raise BrokenPlugin(
            f"{whose(schedule)} fails in rate: {describe_error(error)}; {wanted}", schedule
        ) from error
    if not good:
        raise ConfigError(
            f"schedule: {schedule.name!r} gives the learning rate {value!r} at step {progress.step}; "
            f"expected a finite number >= 0, from {whose(schedule)}"
        )
    return value
