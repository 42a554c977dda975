"""What a training loop needs: its inputs and position, a display, and the other processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import attrs
import numpy as np

from ortflex_core.kernel.batches import Source
from ortflex_core.kernel.engine_protocols import Engine
from ortflex_core.kernel.hooks import HookCall
from ortflex_core.kernel.step_protocols import Schedule
from ortflex_core.kernel.types import Array, Progress


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
    returns scores of the validation data. ``rng`` makes the generator that shuffles an epoch from
    ``seed`` and its number. ``engine_for_epoch`` is called at the start of every epoch and returns
    another engine if other parameters are trained from there on. ``start`` is the position where an
    earlier run of the same plan stopped. ``broken`` names the weight that is not finite at the start,
    if any. ``losses`` has factors of several losses, by their columns. ``peers`` are the processes of
    a distributed training, and ``sync_every`` the number of their separate steps.
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
    rng: Callable[[Sequence[int]], np.random.Generator] = np.random.default_rng
    display: Display = attrs.field(factory=NoDisplay)
    accumulate: int = 1
    engine_for_epoch: Callable[[int], Engine | None] | None = None
    start: Position | None = None
    broken: Callable[[], str] = lambda: ""
    losses: Mapping[str, float] = attrs.field(factory=dict)
    peers: Processes | None = None
    sync_every: int | None = None
