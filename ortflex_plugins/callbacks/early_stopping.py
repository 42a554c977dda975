"""The callback ``early_stopping``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np

from ortflex_core import Array, Callback, CheckpointError, hook, internals_of, number, setting
from ortflex_plugins.callbacks._monitor import AUTO, Monitor

if TYPE_CHECKING:
    from ortflex_core import Progress, Saved, Trainer

_log = logging.getLogger("ortflex")


@attrs.define(kw_only=True)
class EarlyStopping(Callback):
    """Ends the run when a value stops improving, and restores the best weights.

    The run ends after ``patience`` consecutive epochs without an improvement of more than
    ``min_delta``. Each metric defines whether higher values are better. Losses improve when they
    decrease. ``monitor`` is a column of the History; ``"auto"`` is the validation loss, or the training
    loss plus the penalty if there is no validation data.

    Raises:
        ValueError: ``patience`` is less than 1, or ``min_delta`` is negative.
        ConfigError: at the end of the first epoch, if the History has no such column.

    >>> EarlyStopping(patience=3).monitor
    'auto'

    Source: L. Prechelt, "Early stopping - but when?" (1998); scikit-learn's n_iter_no_change.
    """

    every_rank: ClassVar[bool] = True  # it changes weights

    monitor: str = setting(default=AUTO, help="a column of the History")
    patience: int = setting(
        default=10,
        validator=number(ge=1),
        help="the number of epochs without an improvement after which the run ends",
    )
    min_delta: float = setting(
        default=0.0,
        validator=number(ge=0),
        help="the amount that an improvement must exceed to count",
    )
    restore_best: bool = setting(
        default=True, help="whether to restore the weights of the best epoch at the end"
    )
    best_: float | None = attrs.field(default=None, init=False)
    best_epoch_: int = attrs.field(default=-1, init=False)
    _waited: int = attrs.field(default=0, init=False)
    _kept: dict[str, Array] = attrs.field(factory=dict, init=False, repr=False)
    _fresh: bool = attrs.field(default=True, init=False)

    @hook
    def train_start(self, progress: Progress) -> None:
        """Start to count, unless the training is resumed."""
        if progress.step == 0 and progress.epoch == 0:
            self.best_, self.best_epoch_, self._waited, self._kept = None, -1, 0, {}

    @hook
    def epoch_end(self, trainer: Trainer, record: Mapping[str, float]) -> Any:
        """Compare the value with the best one; True ends the training."""
        monitor = Monitor(column=self.monitor, min_delta=self.min_delta)
        value = monitor.value(record)
        if monitor.better(value, self.best_, trainer):
            self.best_, self.best_epoch_, self._waited = value, int(record["epoch"]), 0
            if self.restore_best:
                self._kept = _everything(trainer)
            return False
        self._waited += 1
        return self._waited >= self.patience

    @hook
    def train_end(self, trainer: Trainer) -> None:
        """Restore the best weights."""
        if self._kept:
            _put_back(trainer, self._kept)
            _log.info("the weights are those of epoch %d, the best", self.best_epoch_)

    @hook
    def checkpoint_saving(self, saved: Saved) -> None:
        """Keep the count and the best weights."""
        counts = {"best": self.best_, "best_epoch": self.best_epoch_, "waited": self._waited}
        saved.put("early_stopping", {**counts, **self._kept})

    @hook
    def checkpoint_loading(self, trainer: Trainer, saved: Saved) -> None:
        """Restore the count and the best weights."""
        counts = {"best": float | None, "best_epoch": int, "waited": int}
        values = saved.get("early_stopping", counts, others=np.ndarray)
        if values is not None:
            best, epoch, waited = (values.pop(name) for name in counts)
            _check_kept(values, trainer)
            self.best_, self.best_epoch_, self._waited, self._kept = best, epoch, waited, values


def _everything(trainer: Trainer) -> dict[str, Array]:
    """Weights, running statistics and averages, by kind and name.

    Weights of groups that are trained later are included: they may have changed by the end.
    """
    parts = {"parameter": trainer.get_state(), "buffer": trainer.engine.buffers()}
    if internals_of(trainer).problem.updating.average is not None:
        parts["average"] = trainer.get_state(averaged=True)
    return {f"{kind}/{name}": a for kind, group in parts.items() for name, a in group.items()}


def _check_kept(kept: Mapping[str, Array], trainer: Trainer) -> None:
    """Refuse weights of another model."""
    weights = trainer.get_state()
    for key, array in kept.items():
        kind, _, name = key.partition("/")
        fits = kind == "buffer" or (kind in ("parameter", "average") and name in weights)
        if fits and kind != "buffer":
            fits = (array.shape, array.dtype) == (weights[name].shape, weights[name].dtype)
        if not fits:
            raise CheckpointError(
                f"callbacks.early_stopping.{key} is {array.dtype}{list(array.shape)}, which "
                "matches no weight of the model"
            )


def _put_back(trainer: Trainer, kept: Mapping[str, Array]) -> None:
    inner = internals_of(trainer)
    engine, trained = trainer.engine, inner.problem.parameters

    def part(kind: str) -> dict[str, Array]:
        return {n.removeprefix(f"{kind}/"): a for n, a in kept.items() if n.startswith(f"{kind}/")}

    engine.load({n: a for n, a in part("parameter").items() if n in trained})
    engine.load_buffers(part("buffer"))
    keys = inner.problem.average_keys
    if averages := {keys[n]: a for n, a in part("average").items() if n in trained}:
        engine.load_slots({**engine.slots(), **averages})
