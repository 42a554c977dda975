"""The inputs of a training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from ortflex_core.checkpoints.record import Position
from ortflex_core.data.batches import Source
from ortflex_core.hooks import HookCall
from ortflex_core.process_groups.peers import Peers
from ortflex_core.protocols import Engine, Schedule


@attrs.frozen(kw_only=True)
class TrainingPlan:
    """The inputs of a training loop.

    ``hooks`` maps hook names to callables and has only hooks with an implementation. ``validate``
    returns scores of the validation data. ``engine_for_epoch`` is called at the start of every
    epoch and returns another engine if other parameters are trained from there on. ``lines`` says
    whether a line is printed per epoch if there is no bar. ``start`` is the position where an
    earlier run of the same plan stopped. ``broken`` names the weight that is not finite at the
    start, if any. ``sync_every`` is the number of separate steps of the processes.
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
    progress: bool | None = None
    lines: bool = True
    accumulate: int = 1
    engine_for_epoch: Callable[[int], Engine | None] | None = None
    start: Position | None = None
    broken: Callable[[], str] = lambda: ""
    peers: Peers | None = None
    sync_every: int | None = None
