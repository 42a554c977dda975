"""What a person at a terminal sees of a training: a progress bar, and nothing anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self


class Display:
    """A bar with loss, rate, rows a second and time left; silent when not on a terminal.

    Args:
        total: steps of the training, None if nobody knows.
        wanted: True and False decide; None shows the bar on a terminal only.
    """

    def __init__(self, total: int | None, wanted: bool | None) -> None:
        self._total = total
        self._wanted = wanted
        self._progress: Any = None
        self._task: Any = None
        self._started = self._shown = time.perf_counter()

    def __enter__(self) -> Self:
        if self._wanted is False:
            return self
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        if self._wanted is None and not console.is_terminal:
            return self
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("rate {task.fields[rate]}"),
            TextColumn("{task.fields[speed]} rows/s"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(
            "training", total=self._total, epoch="1", loss="…", rate="…", speed="…"
        )
        self._progress.start()
        self._started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    @property
    def active(self) -> bool:
        """Whether anybody looks."""
        return self._progress is not None

    @property
    def due(self) -> bool:
        """Whether it is time for a new picture."""
        return self._progress is not None and time.perf_counter() - self._shown > 0.1

    def show(self, step: int, epoch: int, loss: float, rate: float, rows: int) -> None:
        """Draw the state after ``step`` steps and ``rows`` rows."""
        self._shown = time.perf_counter()
        speed = rows / max(self._shown - self._started, 1e-9)
        self._progress.update(
            self._task,
            completed=step,
            epoch=str(epoch + 1),
            loss=f"{loss:.4g}",
            rate=f"{rate:.3g}",
            speed=f"{speed:,.0f}",
        )


def epoch_summary(record: Mapping[str, float]) -> str:
    """One line for an epoch: ``epoch 3: loss 0.12, validation_loss 0.15, …``."""
    shown = {k: v for k, v in record.items() if k not in ("epoch", "rows", "seconds")}
    values = ", ".join(f"{k} {v:.4g}" for k, v in shown.items())
    return f"epoch {int(record['epoch']) + 1}: {values} ({record['seconds']:.2f} s)"
