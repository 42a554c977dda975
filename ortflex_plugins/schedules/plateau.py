"""The schedule ``plateau``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import attrs

from ortflex_core import (
    ConfigError,
    Progress,
    Schedule,
    ScheduleContext,
    number,
    one_of,
    setting,
    suggest,
)

_EPS = 1e-8  # smaller changes of the rate are ignored, as in torch


@attrs.frozen(kw_only=True)
class Plateau(Schedule):
    """Reduces the learning rate when a value stops improving: ``rate ← max(rate·factor, minimum)``.

    The learning rate is reduced after more than ``patience`` consecutive epochs without an improvement.
    A change counts as an improvement if it is larger than ``threshold``, which is a fraction of the
    best value or an absolute number. The first ``cooldown`` epochs after a reduction do not count
    toward ``patience``.

    ``monitor`` is a column of the History; ``"auto"`` is the validation loss, or the training loss plus
    the penalty if there is no validation data. ``mode="auto"`` means ``"max"`` for metrics for which
    higher is better, and ``"min"`` for all other columns.

    The learning rate is computed from the complete History, so the schedule has no state of its own
    that a resumed run would have to restore.

    Raises:
        ValueError: ``factor`` is not in (0, 1), another number is negative, or ``mode`` or
            ``threshold_mode`` has another value.
        ConfigError: after the first epoch, if the History has no such column.

    >>> lines = tuple({"loss": loss, "penalty": 0.0} for loss in (2.0, 1.0, 1.0, 1.0))
    >>> Plateau(patience=1).rate(0.1, Progress(epoch=4, history=lines))
    0.010000000000000002

    Source: torch.optim.lr_scheduler.ReduceLROnPlateau.
    """

    name: ClassVar[str] = "plateau"
    aliases: ClassVar[tuple[str, ...]] = ("reduce_on_plateau", "reducelronplateau")

    by: Literal["epoch"] = setting(
        default="epoch", validator=one_of("epoch"), help="the unit of time: completed epochs"
    )
    monitor: str = setting(default="auto", help="a column of the History")
    mode: Literal["auto", "min", "max"] = setting(
        default="auto",
        validator=one_of("auto", "min", "max"),
        help="whether lower or higher values are better",
    )
    factor: float = setting(
        default=0.1,
        validator=number(gt=0, lt=1),
        help="the factor by which the learning rate is multiplied",
    )
    patience: int = setting(
        default=10,
        validator=number(ge=0),
        help="the number of epochs without an improvement that are tolerated before a reduction",
    )
    threshold: float = setting(
        default=1e-4, validator=number(ge=0), help="the change that an improvement has to exceed"
    )
    threshold_mode: Literal["relative", "absolute"] = setting(
        default="relative",
        validator=one_of("relative", "absolute"),
        help="whether the threshold is a fraction of the best value or an absolute number",
    )
    cooldown: int = setting(
        default=0,
        validator=number(ge=0),
        help="the number of epochs after a reduction that do not count toward the patience",
    )
    minimum: float = setting(default=0.0, validator=number(ge=0), help="the lowest learning rate")

    def bind(self, context: ScheduleContext) -> Schedule:
        """The schedule with its mode, which depends on the metric."""
        if self.mode != "auto":
            return self
        return attrs.evolve(self, mode="max" if self.monitor in context.higher else "min")

    def rate(self, base: float, progress: Progress) -> float:
        """The rate after the epochs in ``progress.history``."""
        rate, best = float(base), None
        waited = resting = 0
        for record in progress.history:
            value = self._value(record)
            # Without a best value, every number except NaN is an improvement.
            if (value == value) if best is None else self._better(value, best):
                best, waited = value, 0
            else:
                waited += 1
            if resting > 0:
                resting, waited = resting - 1, 0
            if waited > self.patience:
                lower = max(rate * self.factor, self.minimum)
                rate = lower if rate - lower > _EPS else rate
                resting, waited = self.cooldown, 0
        return rate

    def _value(self, record: Mapping[str, float]) -> float:
        if self.monitor == "auto":
            return record.get("validation_loss", record["loss"] + record["penalty"])
        if self.monitor not in record:
            raise ConfigError(
                f"plateau.monitor: the history has no column {self.monitor!r}; "
                f"{suggest(self.monitor, record)}"
            )
        return record[self.monitor]

    def _better(self, value: float, best: float) -> bool:
        sign = 1 if self.mode == "max" else -1
        if self.threshold_mode == "relative":
            return sign * value > sign * best * (1 + sign * self.threshold)
        return sign * value > sign * best + self.threshold
