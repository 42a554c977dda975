"""The callback ``optuna``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ortflex_core import Callback, ConfigError, Progress, hook, setting
from ortflex_plugins.callbacks._extras import require


@attrs.define(kw_only=True)
class Optuna(Callback):
    """Reports a column of the History to a trial of Optuna, and ends the training if the trial is pruned.

    ``fit`` then raises ``optuna.TrialPruned``, which the study expects from its objective. Because the
    trial is an object, this callback is made in Python and cannot be named in a recipe.

    Raises:
        ConfigError: optuna is not installed (extra ``optuna``), ``trial`` is not a trial, or the History
            has no such column.

    >>> Optuna(trial=trial, metric="validation_loss").metric  # doctest: +SKIP
    'validation_loss'

    Source: optuna.trial.Trial.report and should_prune.
    """

    trial: Any = setting(default=None, help="the trial that the study passes to its objective")
    metric: str = setting(default="validation_loss", help="the column of the History to report")

    def __attrs_post_init__(self) -> None:
        """Check the trial, and that the package is installed."""
        require("optuna")
        if not all(hasattr(self.trial, name) for name in ("report", "should_prune")):
            raise ConfigError(
                "optuna: trial must be the trial that the study passes to its objective, got "
                f"{self.trial!r}: callbacks=[Optuna(trial=trial)]"
            )

    @hook(trylast=True)
    def epoch_end(self, progress: Progress, record: Mapping[str, float]) -> None:
        """Report the value of the epoch; the steps of the trial are finished epochs."""
        if self.metric not in record:
            raise ConfigError(
                f"optuna: the History has no column {self.metric!r}; it has {', '.join(record)}"
            )
        value = float(record[self.metric])
        self.trial.report(value, progress.epoch)
        if self.trial.should_prune():
            from optuna import TrialPruned

            raise TrialPruned(f"pruned after epoch {progress.epoch} with {self.metric} {value:.4g}")
