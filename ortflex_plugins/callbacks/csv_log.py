"""The callback ``csv_log``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ClassVar

import attrs

from ortflex_core import Callback, History, OutputError, Progress, hook, make_folder, setting

if TYPE_CHECKING:
    from ortflex_core import Trainer

_log = logging.getLogger("ortflex")


@attrs.define(kw_only=True)
class CsvLog(Callback):
    """Writes the complete History as a CSV file after every epoch.

    The columns of the file are those of the History. The file of a resumed run also contains the rows
    of the earlier epochs. If the file cannot be written during training, for example because the disk
    is full, the callback logs a warning, and training continues. All rows are then written after the
    next epoch.

    Raises:
        OutputError: when the run starts, if the folder cannot be made or written to.

    >>> CsvLog(path="log.csv").path
    'log.csv'

    Source: ``ortflex_core.History``.
    """

    aliases: ClassVar[tuple[str, ...]] = ("csv_logger",)

    path: str = setting(
        default="log.csv", help="the file, relative to the run folder if there is one"
    )

    @hook
    def train_start(self, trainer: Trainer) -> None:
        """Make the folder, so that a path that cannot be written to is an error at the start."""
        make_folder((trainer.folder / self.path).parent)

    @hook
    def epoch_end(self, trainer: Trainer, progress: Progress) -> None:
        """Write all lines so far."""
        try:
            History(tuple(progress.history)).to_csv(trainer.folder / self.path)
        except OutputError as error:
            _log.warning("csv_log, epoch %d: %s", progress.epoch, error)
