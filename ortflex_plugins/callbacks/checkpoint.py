"""The callback ``checkpoint``."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core import Callback, OutputError, hook, internals_of, number, setting
from ortflex_plugins.callbacks._monitor import AUTO, Monitor
from ortflex_plugins.callbacks._runs import Runs

if TYPE_CHECKING:
    from ortflex_core import Progress, Saved, Trainer


_every = attrs.validators.optional(number(gt=0))


@attrs.define(kw_only=True)
class Checkpoint(Callback):
    """Writes checkpoints to ``<folder>/step-<number>``, from which ``Trainer.resume`` continues training.

    ``epochs``, ``steps`` and ``minutes`` set how often a checkpoint is written. By default, one is
    written after every epoch. If the graph runs several steps at once, the checkpoint is written after
    the last of them. Another checkpoint is written at the end of ``fit``. The callback keeps the last
    ``keep`` checkpoints. It also keeps the checkpoint of the best epoch in ``<folder>/best``;
    ``monitor`` sets the column of the History that decides which epoch is best.

    Every checkpoint contains the identifier of its run, which a resumed run keeps. Only checkpoints of
    the same run are removed or replaced. If the folder contains checkpoints from another run, or if
    another process is writing to it, the run does not start. If a run is resumed from a checkpoint that
    is not its newest one, the newer ones are moved to ``<folder>/superseded-<n>``.

    Raises:
        ValueError: a number is not positive.
        CheckpointError: when the run starts, if the folder is in use or has checkpoints of another
            run.
        OutputError: the folder cannot be written to; older checkpoints are not changed.

    >>> Checkpoint(minutes=10, keep=2).folder
    'checkpoints'

    Source: the format is described in ``ortflex_core.training.artifacts.checkpoint``.
    """

    folder: str = setting(
        default="checkpoints", help="the folder, relative to the run folder if there is one"
    )
    epochs: int | None = setting(
        default=None, validator=_every, help="the number of epochs between two checkpoints"
    )
    steps: int | None = setting(
        default=None, validator=_every, help="the number of steps between two checkpoints"
    )
    minutes: float | None = setting(
        default=None, validator=_every, help="the number of minutes between two checkpoints"
    )
    keep: int = setting(
        default=3, validator=number(ge=1), help="the number of most recent checkpoints to keep"
    )
    best: bool = setting(default=True, help="whether to also keep the checkpoint of the best epoch")
    monitor: str = setting(
        default=AUTO, help="the column of the History that decides which epoch is best"
    )
    _best: float | None = attrs.field(default=None, init=False)
    _improved: bool = attrs.field(default=False, init=False)
    _step: int = attrs.field(default=0, init=False)
    _epoch: int = attrs.field(default=0, init=False)
    _time: float = attrs.field(default=0.0, init=False)
    _failed: bool = attrs.field(default=False, init=False)
    _runs: Runs = attrs.field(factory=Runs, init=False, eq=False, repr=False)

    @hook
    def train_start(self, trainer: Trainer, progress: Progress) -> None:
        """Lock the folder, and start to count."""
        self._step, self._epoch, self._time = progress.step, progress.epoch, time.monotonic()
        self._failed = False
        if progress.step == 0 and progress.epoch == 0:
            self._best = None
        first = internals_of(trainer).live.standing.fits <= 1 and not self._runs.loaded
        self._runs.begin(self._place(trainer), progress.step, fresh=first)

    @hook
    def epoch_end(self, trainer: Trainer, record: Mapping[str, float]) -> None:
        """Decide whether this is the best epoch so far."""
        if self.best:
            monitor = Monitor(column=self.monitor)
            value = monitor.value(record)
            self._improved = monitor.better(value, self._best, trainer)
            self._best = value if self._improved else self._best

    @hook
    def settled(self, trainer: Trainer, progress: Progress) -> None:
        """Write the checkpoints that are due."""
        if self._due(progress):
            self._save(trainer, progress)
        if self._improved:
            self._improved = False
            trainer.save(self._runs.target(self._place(trainer) / "best"))

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
        self._step, self._epoch, self._time = progress.step, progress.epoch, time.monotonic()
        target = self._runs.target(self._place(trainer) / f"step-{progress.step:09d}")
        trainer.save(target)
        self._runs.written(target, self.keep)

    @hook
    def exception(self, error: BaseException) -> None:
        """Note whether the training failed; it is then not saved, unlike after Ctrl-C."""
        self._failed = not isinstance(error, KeyboardInterrupt)

    @hook(wrapper=True, tryfirst=True)
    def train_end(self, trainer: Trainer, progress: Progress) -> Generator[None, Any, Any]:
        """Save the last state, before early stopping restores the best weights."""
        failure: OutputError | None = None
        try:
            if not self._failed and progress.step > self._step:
                self._save(trainer, progress)
        except OutputError as error:
            failure = error
        finally:
            self._runs.end()
        answers = yield
        if failure is not None:
            raise failure
        return answers

    def _place(self, trainer: Trainer) -> Path:
        return trainer.folder / self.folder

    @hook
    def checkpoint_saving(self, saved: Saved) -> None:
        """Keep the best value so far."""
        saved.put("checkpoint", {"best": self._best, "run": self._runs.identifier})

    @hook
    def checkpoint_loading(self, saved: Saved) -> None:
        """Restore the best value and the run."""
        kept = {"best": float | None}
        values = saved.get("checkpoint", kept, optional={"run": str})  # which 0.1.0 did not have
        if values is not None:
            self._best = values["best"]
            self._runs.resume(values["run"])
