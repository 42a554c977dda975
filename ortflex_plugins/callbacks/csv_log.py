"""The callback ``csv_log``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from ortflex_core.component import setting
from ortflex_core.files import OutputError, make_folder
from ortflex_core.hooks import hook
from ortflex_core.types import Progress
from ortflex_core.views import History

if TYPE_CHECKING:
    from ortflex_core import Trainer

_log = logging.getLogger("ortflex")


@attrs.define(kw_only=True)
class CsvLog:
    """Writes the complete History as a CSV file after every epoch.

    A training that continues from a checkpoint keeps the earlier lines. If the file cannot be
    written during the training, for example because the disk is full, there is a warning, the
    training continues, and the next epoch's end tries again.

    Raises:
        OutputError: when the training starts: the folder cannot be made or written to.

    >>> CsvLog(path="log.csv").path
    'log.csv'

    Source: :class:`ortflex_core.types.History`, whose columns the file has.
    """

    path: str = setting(
        default="log.csv", help="the file, relative to the run folder if there is one"
    )

    @hook
    def train_start(self, trainer: Trainer) -> None:
        """Write a file at the start, so that a path that cannot be written to is an early error."""
        make_folder((trainer.folder / self.path).parent)

    @hook
    def epoch_end(self, trainer: Trainer, progress: Progress) -> None:
        """Write all lines so far."""
        try:
            History(progress.history).to_csv(trainer.folder / self.path)
        except OutputError as error:
            _log.warning("csv_log, epoch %d: %s", progress.epoch, error)
