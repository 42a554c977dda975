"""The callback ``epoch_line``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core import Callback, epoch_summary, hook


@attrs.define(kw_only=True)
class EpochLine(Callback):
    """Prints a line per epoch to stdout, even if the Trainer shows a progress bar.

    With this callback, the Trainer does not print its own line per epoch.

    >>> EpochLine().epoch_end(record={"epoch": 1, "loss": 0.25, "seconds": 0.5})
    epoch 1: loss 0.25 (0.50 s)

    Source: :func:`ortflex_core.epoch_summary`.
    """

    prints_epochs: ClassVar[bool] = True

    @hook
    def epoch_end(self, record: Mapping[str, float]) -> None:
        """Print the line and flush the output."""
        print(epoch_summary(record), file=sys.stdout, flush=True)
