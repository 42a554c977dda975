"""What the other processes do while a callback of rank 0 saves: they send their optimizer state."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from ortflex_core.kernel.hooks import Callback, hook
from ortflex_core.training.internals import internals_of

if TYPE_CHECKING:
    from ortflex_core.kernel.types import Progress
    from ortflex_core.training.trainer import Trainer


@attrs.define(eq=False)
class ServeShards(Callback):
    """Sends the optimizer state of this process to that of rank 0, whose callbacks save it.

    Callbacks save in the hook ``settled``, or in a wrapper of ``train_end``. ``saves`` says whether there
    are any in this process.
    """

    every_rank: ClassVar[bool] = True
    saves: bool
    _asked: bool = attrs.field(default=False, init=False)
    _failed: bool = attrs.field(default=False, init=False)

    @hook
    def train_start(self, trainer: Trainer) -> None:
        """Ask whether a callback of rank 0 may save."""
        peers = internals_of(trainer).setup.problem.peers
        self._failed = False
        self._asked = peers is not None and bool(peers.values("saves", self.saves)[0])

    @hook(trylast=True)
    def settled(self, trainer: Trainer) -> None:
        """Send it while the hook of the same name runs in the process of rank 0."""
        self._serve(trainer)

    @hook
    def exception(self, error: BaseException) -> None:
        """Note a failure, after which nothing is saved; after Ctrl-C, the last state is."""
        self._failed = not isinstance(error, KeyboardInterrupt)

    @hook(wrapper=True, trylast=True)
    def train_end(self, trainer: Trainer, progress: Progress) -> Generator[None, Any, Any]:
        """Send it while the last checkpoint is written."""
        if not self._failed:
            self._serve(trainer)
        return (yield)

    def _serve(self, trainer: Trainer) -> None:
        inner = internals_of(trainer)
        engine: Any = inner.engine
        if self._asked and engine.shards is not None:
            if inner.rank:
                engine.serve_slots()
            else:
                engine.shards.release()
