"""The callback ``checkpoint``."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core.checkpoint import numbered
from ortflex_core.component import number
from ortflex_core.hookspecs import hook
from ortflex_plugins.callbacks._monitor import AUTO, Monitor

if TYPE_CHECKING:
    from ortflex_core.checkpoint import Saved
    from ortflex_core.trainer import Trainer
    from ortflex_core.types import Progress


def _every(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None:
        number(gt=0)(instance, attribute, value)


@attrs.define(kw_only=True)
class Checkpoint:
    """Writes checkpoints that ``Trainer.resume`` goes on from: ``<folder>/step-<number>``.

    One is due after ``epochs`` epochs, after ``steps`` steps and after ``minutes`` minutes, whichever
    is given; after every epoch, if none is. It is written after the run of steps in which it became
    due, and at the end of the training. The last ``keep`` stay, and the best in ``<folder>/best``:
    best by ``monitor``, a column of the History, judged at every epoch's end.

    Raises:
        ValueError: a number is not positive.
        OutputError: the folder cannot be written to; older checkpoints are untouched.

    >>> Checkpoint(minutes=10, keep=2).folder
    'checkpoints'

    Source: the periodic checkpoint of every framework; the layout is that of
    ``ortflex_core.checkpoint``.
    """

    folder: str = attrs.field(
        default="checkpoints", metadata={"help": "relative to the run folder, if there is one"}
    )
    epochs: int | None = attrs.field(default=None, validator=_every)
    steps: int | None = attrs.field(default=None, validator=_every)
    minutes: float | None = attrs.field(default=None, validator=_every)
    keep: int = attrs.field(
        default=3, validator=number(ge=1), metadata={"help": "how many of the last stay"}
    )
    best: bool = attrs.field(default=True, metadata={"help": "keep the best epoch's as well"})
    monitor: str = attrs.field(default=AUTO, metadata={"help": "a column of the History"})
    _best: float | None = attrs.field(default=None, init=False)
    _improved: bool = attrs.field(default=False, init=False)
    _step: int = attrs.field(default=0, init=False)
    _epoch: int = attrs.field(default=0, init=False)
    _time: float = attrs.field(default=0.0, init=False)
    _failed: bool = attrs.field(default=False, init=False)

    @hook
    def train_start(self, progress: Progress) -> None:
        """Count from here."""
        self._step, self._epoch, self._time = progress.step, progress.epoch, time.monotonic()
        self._failed = False
        if progress.step == 0 and progress.epoch == 0:
            self._best = None

    @hook
    def epoch_end(self, trainer: Trainer, record: Mapping[str, float]) -> None:
        """Whether this is the best epoch so far."""
        if self.best:
            monitor = Monitor(column=self.monitor)
            value = monitor.value(record)
            self._improved = monitor.better(value, self._best, trainer)
            self._best = value if self._improved else self._best

    @hook
    def settled(self, trainer: Trainer, progress: Progress) -> None:
        """Write what is due."""
        if self._due(progress):
            self._save(trainer, progress)
        if self._improved:
            self._improved = False
            trainer.save(self._place(trainer) / "best")

    def _due(self, progress: Progress) -> bool:
        epochs = self.epochs
        if epochs is None and self.steps is None and self.minutes is None:
            epochs = 1
        return (
            (epochs is not None and progress.epoch - self._epoch >= epochs)
            or (self.steps is not None and progress.step - self._step >= self.steps)
            or (self.minutes is not None and time.monotonic() - self._time >= 60 * self.minutes)
        )

    def _save(self, trainer: Trainer, progress: Progress) -> None:
        place = self._place(trainer)
        self._step, self._epoch, self._time = progress.step, progress.epoch, time.monotonic()
        trainer.save(place / f"step-{progress.step:09d}")
        for old in numbered(place)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    @hook
    def exception(self, error: BaseException) -> None:
        """What went wrong is not saved; what was interrupted is."""
        self._failed = not isinstance(error, KeyboardInterrupt)

    @hook(tryfirst=True)
    def train_end(self, trainer: Trainer, progress: Progress) -> None:
        """The last state, before early stopping goes back to the best weights."""
        if not self._failed and progress.step > self._step:
            self._save(trainer, progress)

    def _place(self, trainer: Trainer) -> Path:
        return trainer.folder / self.folder

    @hook
    def checkpoint_saving(self, saved: Saved) -> None:
        """Keep what was the best so far."""
        saved.put("checkpoint", {"best": self._best})

    @hook
    def checkpoint_loading(self, saved: Saved) -> None:
        """Go on from there."""
        values = saved.get("checkpoint")
        if values is not None:
            self._best = values["best"]
