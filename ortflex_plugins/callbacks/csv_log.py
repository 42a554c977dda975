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

    After a resume, the file also has the earlier lines. If the file cannot be written during the
    training, for example because the disk is full, there is a warning, the training continues, and the
    next epoch writes all lines.

    Raises:
        OutputError: when the run starts, if the folder cannot be made or written to.

    >>> CsvLog(path="log.csv").path
    'log.csv'

    Source: :class:`ortflex_core.History`, whose columns the file has.
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
            History(progress.history).to_csv(trainer.folder / self.path)
        except OutputError as error:
            _log.warning("csv_log, epoch %d: %s", progress.epoch, error)
