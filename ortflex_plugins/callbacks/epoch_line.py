"""The callback ``epoch_line``."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import attrs

from ortflex_core.display import summary
from ortflex_core.hookspecs import hook


@attrs.define(kw_only=True)
class EpochLine:
    """Prints a line per epoch, for logs that are no terminal.

    >>> EpochLine().epoch_end(record={"epoch": 0, "loss": 0.25, "seconds": 0.5})
    epoch 1: loss 0.25 (0.50 s)

    Source: :func:`ortflex_core.display.summary`.
    """

    @hook
    def epoch_end(self, record: Mapping[str, float]) -> None:
        """Print the line at once, however the output is buffered."""
        print(summary(record), file=sys.stdout, flush=True)
