"""Shared by callbacks that write to a tracker of runs: what a run receives, and when."""

from __future__ import annotations

import abc
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core.config import Parts, to_plain
from ortflex_core.errors import ConfigError, OrtflexError
from ortflex_core.hooks import hook
from ortflex_core.training import internals_of

if TYPE_CHECKING:
    from ortflex_core import Trainer
    from ortflex_core.checkpoints import Saved
    from ortflex_core.types import Progress

_log = logging.getLogger("ortflex")


@attrs.define(kw_only=True)
class Tracker(abc.ABC):
    """Tells a tracker the parameters, the History and the end of a training.

    A subclass opens a run, which has ``log(metrics, step=…)``, and ends it. A resumed training continues
    the run whose identifier is in its checkpoint. What the tracker raises during the training is a warning.
    """

    _run: Any = attrs.field(default=None, init=False, repr=False, eq=False)
    _id: str | None = attrs.field(default=None, init=False)
    _failed: bool = attrs.field(default=False, init=False)

    @property
    @abc.abstractmethod
    def tracker(self) -> str:
        """The name of the callback."""

    @abc.abstractmethod
    def open(self, trainer: Trainer, config: dict[str, Any], known: str | None) -> tuple[Any, str]:
        """Open a new run, or the ``known`` one; the run and its identifier."""

    @abc.abstractmethod
    def close(self, run: Any, *, failed: bool) -> None:
        """End a run."""

    def store(self, run: Any, file: Path) -> None:
        """Store the trained model, where ``stores``."""
        raise NotImplementedError

    @property
    def stores(self) -> bool:
        """Whether the trained model is stored; by default not."""
        return False

    @property
    def run_id_(self) -> str | None:
        """The run of the last training."""
        return self._id

    @hook
    def train_start(self, trainer: Trainer, progress: Progress) -> None:
        """Open a run, or continue the one of the checkpoint."""
        self._failed = False
        known = self._id if progress.step or progress.epoch else None
        try:
            self._run, self._id = self.open(trainer, parameters(trainer), known)
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
        self._failed = not isinstance(error, KeyboardInterrupt)

    @hook(trylast=True)
    def train_end(self, trainer: Trainer) -> None:
        """Store the model, after early stopping has restored the best weights, and end the run."""
        run, self._run = self._run, None
        if run is None:
            return
        with self._tolerant("the end of the run"):
            if self.stores and not self._failed:
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "model.onnx"
                    trainer.export(file)
                    self.store(run, file)
            self.close(run, failed=self._failed)

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


def parameters(trainer: Trainer) -> dict[str, Any]:
    """The Trainer's arguments, components as tables with every parameter; objects by their repr."""
    inner = internals_of(trainer)
    parts, out = Parts(trainer.plugins), dict[str, Any]()
    for name, value in inner.arguments.items():
        if value is None or value == ():
            continue
        try:
            out[name] = _plain(to_plain(parts.spell_out(name, value)))
        except (OrtflexError, TypeError):
            out[name] = repr(value)
    return {**out, "backend_": trainer.backend_, "runtime": str(inner.runtime)}


def _plain(value: Any) -> Any:
    """Values that JSON has; others by their repr."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
