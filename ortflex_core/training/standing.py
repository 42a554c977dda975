"""The progress of a Trainer between two calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ortflex_core.kernel.plan import Position
from ortflex_core.kernel.types import Array, Progress, Size
from ortflex_core.training.artifacts.checkpoint import Written
from ortflex_core.training.fingerprint import Identity


@attrs.frozen(kw_only=True)
class Training:
    """What the fits of a Trainer had, for the receipt of an export.

    ``facts`` has digests of the data and the settings at the start of the last fit; ``obstacles`` are the
    reasons why it cannot be repeated.
    """

    facts: Mapping[str, Any]
    obstacles: tuple[str, ...] = ()


@attrs.define
class Standing:
    """The progress of a Trainer between two calls.

    ``position`` belongs to an unfinished run, which the next fit continues. ``last`` belongs to a
    fit that was interrupted in this process: its checkpoints can be resumed, but the next fit
    starts a new run. ``slots`` and ``buffers`` are kept for the next engine. ``written`` is the
    checkpoint of this model that was written or read last, ``identity`` is common to all
    checkpoints. The engine was built for ``size`` and ``epoch``. ``backend`` is the choice of
    ``fastest``. Without ``strict``, different data are accepted. ``training`` describes the fits,
    ``by_hand`` names the calls that changed the weights besides them.
    """

    fits: int = 0
    manual: Progress = attrs.field(factory=Progress)
    position: Position | None = None
    last: Position | None = None
    slots: Mapping[str, Array] = attrs.field(factory=dict)
    buffers: Mapping[str, Array] = attrs.field(factory=dict)
    written: Written | None = None
    size: Size | None = None
    epoch: int = 0
    identity: Identity | None = None
    backend: str | None = None
    strict: bool = True
    training: Training | None = None
    by_hand: tuple[str, ...] = ()

    def changed_by(self, call: str) -> None:
        """Note a call that changed the weights outside of ``fit``."""
        if call not in self.by_hand:
            self.by_hand = (*self.by_hand, call)

    def built(self, size: Size, taken: Iterable[str]) -> None:
        """Record that an engine was built and has taken over the slots."""
        left = set(self.slots) - set(taken)
        self.size, self.slots, self.buffers = size, {n: self.slots[n] for n in left}, {}
