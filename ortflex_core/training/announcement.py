"""What a training says before its first step."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortflex_core.training.trainer import Trainer

_log = logging.getLogger("ortflex")


def announce(trainer: Trainer) -> None:
    """Log what is trained and where; print the first line where logging is not configured.

    A script that configures no logging then sees the line, as it sees a progress bar.
    """
    headline = trainer.setup.headline()
    _log.info("%s", headline)
    _log.debug("%s", trainer.describe())
    if trainer.progress is not False and not _log.isEnabledFor(logging.INFO):
        print(headline, file=sys.stderr, flush=True)
    _log.info("backend %s on %s, %s", trainer.backend_, trainer.device.name, trainer.runtime)
    if trainer.hooks.installed:
        _log.info("hooks of installed plugins: %s", ", ".join(trainer.hooks.installed))
