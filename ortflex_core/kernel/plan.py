"""The inputs of a training loop, and what it needs from others: a display, and the other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, Self

import attrs

from ortflex_core.kernel.batches import Source
from ortflex_core.kernel.hooks import HookCall
from ortflex_core.kernel.position import Position
from ortflex_core.kernel.protocols.backend import Engine
from ortflex_core.kernel.protocols.schedule import Schedule
from ortflex_core.kernel.types import Array


class Display(Protocol):
    """Shows the progress of a run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def active(self) -> bool:
        """Whether :meth:`show` shows anything."""

    @property
    def due(self) -> bool:
        """Whether it is time for an update."""

    def show(self, step: int, epoch: int, loss: float, rate: float, rows: int) -> None:
        """Show the state after ``step`` steps and ``rows`` rows."""

    def end_epoch(self, step: int, record: Mapping[str, float]) -> None:
        """Show the end of an epoch: its line of the History."""


class NoDisplay:
    """Shows nothing."""

    active = due = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was shown."""

    def show(self, step: int, epoch: int, loss: float, rate: float, rows: int) -> None:
        """Show nothing."""

    def end_epoch(self, step: int, record: Mapping[str, float]) -> None:
        """Show nothing."""


class Processes(Protocol):
    """The processes of a distributed training; all of them call the same methods in the same order."""

    size: int
    """The number of processes."""
    wishes: Callable[[], bool]
    """Whether this process was interrupted; it is sent with every message."""
    interrupted: bool
    """Whether any process was interrupted before the last message."""

    def any(self, place: str, flag: bool) -> bool:
        """Whether the flag is true in any process."""

    def agree_on_weights(self, state: Mapping[str, Array], epoch: int) -> None:
        """Check that all processes have the same weights."""


@attrs.frozen(kw_only=True)
class TrainingPlan:
    """The inputs of a training loop.

    ``hooks`` maps hook names to callables and has only hooks with an implementation. ``validate``
    returns scores of the validation data. ``engine_for_epoch`` is called at the start of every
    epoch and returns another engine if other parameters are trained from there on. ``start`` is the
    position where an earlier run of the same plan stopped. ``broken`` names the weight that is not
    finite at the start, if any. ``losses`` has factors of several losses, by their columns. ``peers``
    are the processes of a distributed training, and ``sync_every`` the number of their separate steps.
    """

    engine: Engine
    source: Source
    schedule: Schedule
    base_rate: float
    epochs: int
    hooks: Mapping[str, HookCall]
    validate: Callable[[], Mapping[str, float]] | None = None
    shuffle: bool = True
    seed: tuple[int, ...] = (0,)
    display: Display = attrs.field(factory=NoDisplay)
    accumulate: int = 1
    engine_for_epoch: Callable[[int], Engine | None] | None = None
    start: Position | None = None
    broken: Callable[[], str] = lambda: ""
    losses: Mapping[str, float] = attrs.field(factory=dict)
    peers: Processes | None = None
    sync_every: int | None = None
