"""The column of the History that decides which epoch is the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from ortflex_core import ConfigError, internals_of, suggest

if TYPE_CHECKING:
    from ortflex_core import Trainer

AUTO = "auto"


@attrs.frozen(kw_only=True)
class Monitor:
    """A column of the History, and the comparison of its values.

    ``"auto"`` is ``validation_loss`` if there are validation data, else loss + penalty.
    """

    column: str = AUTO
    min_delta: float = 0.0

    def value(self, record: Mapping[str, float]) -> float:
        """The value of an epoch.

        Raises:
            ConfigError: there is no such column.
        """
        if self.column == AUTO:
            return record.get("validation_loss", record["loss"] + record["penalty"])
        if self.column not in record:
            raise ConfigError(
                f"monitor: the history has no column {self.column!r}; {suggest(self.column, record)}"
            )
        return record[self.column]

    def better(self, new: float, old: float | None, trainer: Trainer) -> bool:
        """Whether ``new`` is better than ``old`` by more than ``min_delta``; NaN is never better."""
        if old is None:
            return new == new
        if self.higher(trainer):
            return new > old + self.min_delta
        return new < old - self.min_delta

    def higher(self, trainer: Trainer) -> bool:
        """Whether higher values are better, which a metric declares; losses are better when lower."""
        name = self.column.removeprefix("validation_")
        return any(
            m.column == name and m.better == "higher" for m in internals_of(trainer).setup.metrics
        )
