"""The callback ``csv_log``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ortflex_core.hookspecs import hook
from ortflex_core.types import History, Progress

if TYPE_CHECKING:
    from ortflex_core.trainer import Trainer


@attrs.define(kw_only=True)
class CsvLog:
    """Writes the History as a CSV file, whole at every epoch's end.

    A training that goes on from a checkpoint goes on with the lines of the one before it.

    Raises:
        OutputError: the file cannot be written.

    >>> CsvLog(path="log.csv").path
    'log.csv'

    Source: :class:`ortflex_core.types.History`, whose columns the file has.
    """

    path: str = attrs.field(
        default="log.csv", metadata={"help": "relative to the run folder, if there is one"}
    )

    @hook
    def epoch_end(self, trainer: Trainer, progress: Progress) -> None:
        """Write all lines so far."""
        History(progress.history).to_csv(trainer.folder / self.path)
