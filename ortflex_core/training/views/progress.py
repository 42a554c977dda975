"""The display of progress during training: a bar in terminals and notebooks, lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from typing import Any, Self

from ortflex_core.kernel.notebook import in_notebook

_log = logging.getLogger("ortflex")
_EVERY = 0.1
"""Seconds between two updates."""
_LONG = 1.0
"""Seconds of a work after which a line says how long it took."""


def say(line: str, progress: bool | None = None) -> None:
    """Log a line, or print it if logging is not configured to show it and ``progress`` is not False.

    It is printed to stderr; in notebooks, which show stderr as if it were an error, to the output of
    the cell.
    """
    if progress is False or _log.isEnabledFor(logging.INFO):
        _log.info("%s", line)
    else:
        print(line, file=sys.stdout if in_notebook() else sys.stderr, flush=True)


class Display:
    """Shows loss, rate, rows per second and remaining time.

    Args:
        total: steps of the training, None if unknown.
        wanted: False shows nothing. None shows a bar in a terminal or a notebook, and a line per
            epoch elsewhere; True shows a bar everywhere.
        lines: whether to show lines without a bar.
    """

    def __init__(self, total: int | None, wanted: bool | None, lines: bool = True) -> None:
        self._total, self._wanted, self._lines = total, wanted, lines and wanted is None
        self._view: _Bar | _NotebookBar | None = None
        self._scores = ""
        self._started = self._shown = time.perf_counter()

    def __enter__(self) -> Self:
        if self._wanted is not False:
            self._view = _notebook(self._total) or _terminal(self._total, bool(self._wanted))
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if self._view is not None:
            self._view.close()

    @property
    def active(self) -> bool:
        """Whether there is a bar."""
        return self._view is not None

    @property
    def due(self) -> bool:
        """Whether it is time for an update."""
        return self._view is not None and time.perf_counter() - self._shown > _EVERY

    def show(self, step: int, epoch: int, loss: float, rate: float, rows: int) -> None:
        """Draw the state after ``step`` steps and ``rows`` rows."""
        self._shown = time.perf_counter()
        so_far = {"rows": rows, "seconds": self._shown - self._started}
        self._draw(step, epoch + 1, loss, rate, so_far)

    def _draw(
        self, step: int, epoch: int, loss: float, rate: float, work: Mapping[str, float]
    ) -> None:
        speed = work["rows"] / max(work["seconds"], 1e-9)
        scores = {"": self._scores} if self._scores else {}
        speeds = {"rate": f"{rate:.3g}", "rows/s": f"{speed:,.0f}"}
        fields = {"loss": f"{loss:.4g}", **scores, **speeds}
        if self._view is not None:
            self._view.update(step, f"epoch {epoch}", fields)

    def end_epoch(self, step: int, record: Mapping[str, float]) -> None:
        """Draw the end of an epoch, with its validation, or print its line."""
        if self._view is None:
            if self._lines:
                say(epoch_summary(record))
            return
        scores = {k: v for k, v in record.items() if k.startswith("validation_")}
        self._scores = ", ".join(f"{k} {v:.4g}" for k, v in scores.items())
        self._draw(step, int(record["epoch"]), record["loss"], record["rate"], record)


class RowCount:
    """Shows how many rows of some work are done, and rows per second; a line at the end of long work."""

    def __init__(self, what: str, total: int, wanted: bool | None) -> None:
        self._what, self._total, self._wanted = what, total, wanted
        self._view: _Bar | _NotebookBar | None = None
        self._started = self._shown = time.perf_counter()
        self._done = 0

    def __enter__(self) -> Callable[[int], None]:
        if self._wanted is not False:
            self._view = _notebook(self._total) or _terminal(self._total, bool(self._wanted))
        self._started = time.perf_counter()
        return self._show

    def __exit__(self, failed: object, *error: object) -> None:
        if self._view is not None:
            self._view.close()
        if failed is None and self._done:
            seconds = time.perf_counter() - self._started
            speed = f"{self._done / max(seconds, 1e-9):,.0f} rows/s"
            line = f"{self._what}: {self._done} rows in {seconds:.2f} s ({speed})"
            say(line, self._wanted if seconds > _LONG else False)

    def _show(self, done: int) -> None:
        now, self._done = time.perf_counter(), done
        if self._view is not None and (done == self._total or now - self._shown > _EVERY):
            self._shown = now
            speed = f"{done / max(now - self._started, 1e-9):,.0f}"
            self._view.update(done, self._what, {"rows/s": speed}, "rows")


class _Bar:
    """A bar of rich in a terminal."""

    def __init__(self, console: Any, total: int | None) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        # In a narrow terminal the text is cut, not the bar and the numbers.
        column = partial(Column, no_wrap=True)
        width = len(f"{total}/{total}") if total is not None else 8
        self._progress = Progress(
            TextColumn("{task.fields[label]}", table_column=column(min_width=9)),
            BarColumn(bar_width=14, table_column=column(min_width=10)),
            MofNCompleteColumn(table_column=column(min_width=width)),
            TextColumn("{task.fields[text]}", table_column=column(overflow="ellipsis", ratio=1)),
            TimeRemainingColumn(table_column=column(min_width=7)),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("training", total=total, label="", text="")
        self._progress.start()

    def update(self, step: int, label: str, fields: Mapping[str, str], unit: str = "steps") -> None:
        text = "  ".join(f"{name} {value}".strip() for name, value in fields.items())
        self._progress.update(self._task, completed=step, label=label, text=text)

    def close(self) -> None:
        self._progress.stop()


class _NotebookBar:
    """An HTML progress element, replaced in place."""

    def __init__(self, handle: Any, html: Any, total: int | None) -> None:
        self._handle, self._html, self._total = handle, html, total

    def update(self, step: int, label: str, fields: Mapping[str, str], unit: str = "steps") -> None:
        of = "" if self._total is None else f'value="{step}" max="{self._total}"'
        steps = f"{step}" if self._total is None else f"{step}/{self._total}"
        text = ", ".join(f"{name} {value}".strip() for name, value in fields.items())
        body = f"{escape(label)} <progress {of}></progress> {steps} {unit}, {escape(text)}"
        self._handle.update(self._html(body))

    def close(self) -> None:
        """Leave the last update in the notebook."""


def _terminal(total: int | None, wanted: bool) -> _Bar | None:
    from rich.console import Console

    console = Console(stderr=True)
    return _Bar(console, total) if wanted or console.is_terminal else None


def _notebook(total: int | None) -> _NotebookBar | None:
    """A bar, if this process is the kernel of a notebook."""
    if not in_notebook():
        return None
    from IPython.display import HTML, display

    handle = display(HTML("compiling …"), display_id=True)
    return None if handle is None else _NotebookBar(handle, HTML, total)


def epoch_summary(record: Mapping[str, float]) -> str:
    """One line for an epoch: ``epoch 3: loss 0.12, validation_loss 0.15, …``."""
    hidden = {"epoch", "rows", "seconds"} | ({"penalty"} if not record.get("penalty") else set())
    values = ", ".join(f"{k} {v:.4g}" for k, v in record.items() if k not in hidden)
    return f"epoch {int(record['epoch'])}: {values} ({record['seconds']:.2f} s)"
