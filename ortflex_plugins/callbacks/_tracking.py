"""Shared by callbacks that write runs to a tracker: what a run receives, and when."""

from __future__ import annotations

import abc
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from ortflex_core import Callback, ConfigError, OrtflexError, Parts, hook, internals_of, to_plain
from ortflex_plugins.callbacks._extras import require

if TYPE_CHECKING:
    from ortflex_core import Progress, Saved, Trainer

_log = logging.getLogger("ortflex")

Outcome = Literal["finished", "interrupted", "failed"]


@attrs.define(kw_only=True)
class Tracker(Callback):
    """Writes the parameters, the History and the outcome of a run to a tracker.

    ``tracker`` is the name of the callback, of its package and of the extra of ortflex. A subclass
    opens the tracker's run, which has ``log(metrics, step=…)``, and ends it. A resumed training
    continues the run whose identifier is in its checkpoint. Errors of the tracker during the training
    become warnings.
    """

    tracker: ClassVar[str]
    _run: Any = attrs.field(default=None, init=False, repr=False, eq=False)
    _id: str | None = attrs.field(default=None, init=False)
    _outcome: Outcome = attrs.field(default="finished", init=False)

    def __attrs_post_init__(self) -> None:
        """Check that the package is installed."""
        require(self.tracker)

    @abc.abstractmethod
    def open(self, trainer: Trainer, known: str | None) -> tuple[Any, str]:
        """Open a new run, or the ``known`` one; returns the run and its identifier."""

    @abc.abstractmethod
    def close(self, run: Any, outcome: Outcome) -> None:
        """End a run."""

    def store(self, run: Any, trainer: Trainer, folder: Path) -> None:
        """Store the trained model, if ``model``; ``folder`` is empty and is removed afterwards."""
        raise NotImplementedError

    @property
    def run_id_(self) -> str | None:
        """The run of the last training."""
        return self._id

    @hook
    def train_start(self, trainer: Trainer, progress: Progress) -> None:
        """Open a run, or continue the one of the checkpoint."""
        self._outcome = "finished"
        known = self._id if progress.step or progress.epoch else None
        try:
            self._run, self._id = self.open(trainer, known)
        except ConfigError:
            raise
        except Exception as error:  # of the tracker's client, its files or the network
            raise ConfigError(
                f"{self.tracker}: no run can be opened: {type(error).__name__}: {error}"
            ) from error

    @hook
    def epoch_end(self, progress: Progress, record: Mapping[str, float]) -> None:
        """Log the epoch's line of the History."""
        metrics = {name: float(value) for name, value in record.items()}
        with self._tolerant("the metrics of an epoch"):
            self._run.log(metrics, step=progress.step)

    @hook
    def exception(self, error: BaseException) -> None:
        """Note how the run ended."""
        self._outcome = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    @hook(trylast=True)
    def train_end(self, trainer: Trainer) -> None:
        """Store the model, after early stopping has restored the best weights, and end the run."""
        run, self._run = self._run, None
        if run is None:
            return
        with self._tolerant("the end of the run"):
            if getattr(self, "model", False) and self._outcome != "failed":
                with tempfile.TemporaryDirectory() as folder:
                    self.store(run, trainer, Path(folder))
            self.close(run, self._outcome)

    @hook
    def checkpoint_saving(self, saved: Saved) -> None:
        """Keep the identifier of the run."""
        saved.put(self.tracker, {"run": self._id})

    @hook
    def checkpoint_loading(self, saved: Saved) -> None:
        """Continue that run."""
        values = saved.get(self.tracker, {"run": str | None})
        if values is not None:
            self._id = values["run"]

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the tracker's client, its files or the network
            _log.warning(
                "%s: %s could not be written: %s: %s",
                self.tracker,
                what,
                type(error).__name__,
                error,
            )


def arguments(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The Trainer's arguments; components are tables with every parameter, other objects their repr."""
    inner = internals_of(trainer)
    parts = Parts(trainer.plugins)
    for name, value in inner.arguments.items():
        if value is None or value == ():
            continue
        try:
            yield name, to_plain(parts.spell_out(name, value))
        except (OrtflexError, TypeError):
            yield name, repr(value)


def parameters(trainer: Trainer) -> dict[str, Any]:
    """The Trainer's arguments, its backend and the runtime, as values of JSON."""
    out = {name: _plain(value) for name, value in arguments(trainer)}
    return {**out, "backend_": trainer.backend_, "runtime": str(internals_of(trainer).runtime)}


def _plain(value: Any) -> Any:
    """Values that JSON has; others by their repr."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
