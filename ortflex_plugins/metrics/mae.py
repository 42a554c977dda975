"""The metric ``mae``."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from ortflex_core.protocols import Metric
from ortflex_core.types import Array
from ortflex_plugins.metrics._averages import Average, same_shape


@attrs.frozen(kw_only=True)
class MeanAbsoluteError(Metric):
    """Mean absolute error: ``Σ w·|y − p| / Σ w``, averaged over the outputs; in the label's unit.

    Raises:
        DataError: labels and predictions of different shapes, or weights that do not fit.

    >>> import numpy as np
    >>> state = MeanAbsoluteError().start()
    >>> state.update(np.array([1.0, 2.0]), np.array([1.5, 2.0]), None)
    >>> state.result()
    0.25

    Source: sklearn.metrics.mean_absolute_error.
    """

    name: ClassVar[str] = "mae"
    aliases: ClassVar[tuple[str, ...]] = ("mean_absolute_error",)
    better: ClassVar[Literal["higher", "lower"]] = "lower"

    def start(self) -> MaeState:
        """An empty accumulator."""
        return MaeState()


class MaeState:
    """Weighted sums of absolute errors."""

    def __init__(self) -> None:
        self._errors = Average("mae")

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        """Take in one batch."""
        same_shape("mae", expected, predicted)
        self._errors.add(abs(expected.astype(float) - predicted.astype(float)), weight)

    def result(self) -> float:
        """The mean over rows and outputs; NaN of nothing."""
        return float(self._errors.means().mean())
