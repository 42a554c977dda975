"""The result of a learning-rate finder: a loss for each rate, a suggestion, a plot, a file."""

from __future__ import annotations

import csv
import io
import math
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ortflex_core.kernel.files import write_bytes
from ortflex_core.training.views.history import axes_for

_FIRST = 10
"""The number of steps at the start whose smoothed losses are means of too few to compare with."""
_ERRORS = 2.5
"""By how many standard errors of its start the smoothed loss has to fall before a rate is suggested."""


@attrs.frozen(repr=False, slots=False)
class RateSweep:
    """The losses of steps whose learning rates rise exponentially.

    Attributes:
        rates: the rate of each step.
        losses: loss + penalty of each batch, before the step.
        smoothing: β of the smoothed losses, in [0, 1).
        diverged: whether the sweep ended before its last rate, because the loss rose too far or was
            not finite.

    >>> sweep = RateSweep((0.1, 0.2, 0.4), (1.0, 0.5, 0.5), smoothing=0.5)
    >>> [round(loss, 3) for loss in sweep.smoothed]
    [1.0, 0.667, 0.571]
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothing: float = attrs.field(default=0.98, kw_only=True)
    diverged: bool = attrs.field(default=False, kw_only=True)

    @cached_property
    def smoothed(self) -> tuple[float, ...]:
        """Exponential means of the losses: ``m_t = β·m_{t−1} + (1 − β)·l_t``, divided by ``1 − βᵗ``."""
        return tuple(smooth(self.losses, self.smoothing))

    @cached_property
    def _lowest(self) -> tuple[int, int]:
        """The first step that counts, and that of the lowest smoothed loss from there on."""
        first = min(_FIRST, len(self) // 4)
        return first, first + int(np.argmin(self.smoothed[first:]))

    @cached_property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss has made a quarter of its fall; None if it does not fall.

        The fall is that from the eleventh step to the lowest smoothed loss, and the rate is that of the
        last step in between that is above that level. The smoothed loss of the eleventh step is a mean of
        few batches. A fall from it by less than 2.5 of its standard errors may be chance, so it does not
        count, neither as the whole fall nor as the quarter.
        """
        if len(self) < 4:
            return None
        first, lowest = self._lowest
        smoothed, before = np.asarray(self.smoothed), np.asarray(self.losses[: lowest + 1])
        fall = smoothed[first] - smoothed[lowest]
        # Differences of successive losses are those of the batches; the fall itself hardly changes them.
        chance = _ERRORS * np.diff(before).std() / math.sqrt(2 * (first + 1))
        if fall <= chance:
            return None
        level = smoothed[first] - max(fall / 4, chance)
        above = np.nonzero(smoothed[first:lowest] > level)[0]
        return self.rates[first + int(above[-1])]

    @property
    def span(self) -> tuple[float, float]:
        """The lowest smoothed loss and that of the start, the part that a plot has to show."""
        first, lowest = self._lowest
        return self.smoothed[lowest], max(self.smoothed[first : lowest + 1])

    def __len__(self) -> int:
        return len(self.rates)

    def __repr__(self) -> str:
        """One line: the rates, the suggestion."""
        if not self.rates:
            return "<RateSweep of no steps>"
        found = "no suggestion" if self.suggestion is None else f"suggestion {self.suggestion:.3g}"
        end = ", where the loss diverged" if self.diverged else ""
        return (
            f"<RateSweep of {len(self)} steps from {self.rates[0]:.3g} to {self.rates[-1]:.3g}{end}: "
            f"{found}>"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the losses over the rates, on a logarithmic axis, and the suggestion with matplotlib.

        Args:
            ax: the matplotlib axes to draw on; by default those of a new figure of pyplot.

        Returns:
            The axes. A notebook cell that ends with this call shows only the figure.

        Raises:
            ArgumentError: ax is something else than axes, such as the path of a picture.
            ConfigError: matplotlib is not installed.
        """
        ax = axes_for("RateSweep.plot", ax, "; to_csv writes a table")
        ax.plot(self.rates, self.losses, linewidth=0.7, alpha=0.5, label="loss")
        ax.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            label = f"suggestion {self.suggestion:.3g}"
            ax.axvline(self.suggestion, color="black", linestyle="--", label=label)
        # A loss that diverged would hide the curve.
        low, high = self.span
        room = 0.3 * (high - low) or 0.1 * abs(high) or 1.0
        ax.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(low - room, high + room))
        ax.grid(alpha=0.3)
        ax.legend()
        return ax

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line per step, with the columns rate, loss and smoothed."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("rate", "loss", "smoothed"))
        writer.writerows(zip(self.rates, self.losses, self.smoothed, strict=True))
        write_bytes(Path(path), out.getvalue().encode())


def smooth(losses: tuple[float, ...] | list[float], beta: float) -> list[float]:
    """Exponential means, corrected for the start at 0."""
    out, mean = [], 0.0
    for count, loss in enumerate(losses, 1):
        mean = beta * mean + (1 - beta) * loss
        out.append(mean / (1 - math.pow(beta, count)))
    return out
