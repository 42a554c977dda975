"""Metrics: measures of the quality of predictions."""

from __future__ import annotations

import abc
from typing import ClassVar, Literal, Protocol

import attrs

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.types import Array


class MetricState(Protocol):
    """The accumulator of a metric."""

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        """Add one batch."""

    def result(self) -> float:
        """The metric over all batches so far."""


@attrs.frozen(kw_only=True)
class Metric(Component, abc.ABC):
    """A metric measures the quality of predictions and is updated batch by batch."""

    better: ClassVar[Literal["higher", "lower"]]

    @property
    def column(self) -> str:
        """Its name in the History, after ``validation_``."""
        return self.name

    @abc.abstractmethod
    def start(self) -> MetricState:
        """An empty accumulator."""
