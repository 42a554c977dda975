"""The History of a run: one entry per epoch, as columns, a table, a frame, a plot or a file."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import attrs
import numpy as np

from ortflex_core.kernel.errors import ArgumentError, ConfigError, short_repr, suggest
from ortflex_core.kernel.files import write_bytes
from ortflex_core.kernel.install_command import install_command
from ortflex_core.kernel.synonyms import no_attribute
from ortflex_core.training.views.summary import html_table

_COUNTS = ("epoch", "rows")
_SHOWN = 60
"""The number of rows of a table in a notebook; longer tables are cut in the middle."""


class _NoSuchEpoch(ConfigError, IndexError):
    """There is no epoch of that number."""


@attrs.frozen(repr=False)
class History:
    """The results of a run, one entry per epoch.

    Columns: ``epoch`` (from 1), ``loss``, ``penalty``, ``rate``, ``rows``, ``seconds`` and, if
    there are validation data, ``validation_loss`` and one column ``validation_<metric>`` per
    metric. With several losses there is a column ``loss/<output>`` for each, before its factor.
    ``seconds`` is the wall time of the epoch, validation, callbacks and checkpoints included;
    hooks at the end of an epoch see the time until then.

    >>> history = History(({"epoch": 1, "loss": 0.5, "penalty": 0.0},
    ...                    {"epoch": 2, "loss": 0.25, "penalty": 0.0}))
    >>> history
    <History of 2 epochs: loss 0.5 → 0.25>
    >>> history["loss"]
    [0.5, 0.25]
    >>> history[-1]["loss"]
    0.25
    """

    epochs: tuple[Mapping[str, float], ...] = ()
    interrupted: bool = False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    def __len__(self) -> int:
        return len(self.epochs)

    @overload
    def __getitem__(self, column: str) -> list[float]: ...
    @overload
    def __getitem__(self, column: int) -> Mapping[str, float]: ...
    @overload
    def __getitem__(self, column: slice) -> History: ...
    def __getitem__(self, column: str | int | slice) -> list[float] | Mapping[str, float] | History:
        """The values of a column, NaN in epochs without one; by a number, the results of an epoch.

        ``history[-1]`` is the last epoch, ``history[10:]`` the History of some epochs.

        Raises:
            ConfigError: no epoch has the column.
            ConfigError, IndexError: there is no epoch of that number.
        """
        if isinstance(column, slice):
            return attrs.evolve(self, epochs=self.epochs[column])
        if isinstance(column, int | np.integer):
            if not -len(self) <= column < len(self):
                raise _NoSuchEpoch(
                    f"the History has {len(self)} epochs, so it has no entry {column}"
                )
            return self.epochs[column]
        if not isinstance(column, str):
            raise ConfigError(
                "the History has columns by name (history['loss']) and epochs by number (history[-1]), "
                f"got {column!r}"
            )
        self._require(column)
        return [row.get(column, math.nan) for row in self.epochs]

    def __iter__(self) -> Iterator[Mapping[str, float]]:
        return iter(self.epochs)

    def _require(self, column: str) -> None:
        if self.epochs and column not in self.columns:
            known = self.columns
            found = suggest(column, known, {n.replace("validation_", "val_"): n for n in known})
            if column.startswith(("val_", "validation_")) and "validation_loss" not in known:
                found = "it was trained without validation data: fit(X, y, validation_data=0.2)"
            raise ConfigError(f"the History has no column {column!r}; {found}")

    @property
    def headline(self) -> str:
        """The number of epochs, and the first and last values of the results.

        An epoch that was interrupted has no validation results.
        """
        count = len(self)
        shown = [
            f"{name} {values[0]:.4g}" + (f" → {values[-1]:.4g}" if len(values) > 1 else "")
            for name in self.columns
            if name == "loss" or name.startswith("validation_")
            for values in [[v for v in self[name] if not math.isnan(v)]]
            if values
        ]
        end = f": {', '.join(shown)}" if shown else ""
        stop = ", interrupted" if self.interrupted else ""
        return f"{count} epoch{'s' if count != 1 else ''}{end}{stop}"

    def __repr__(self) -> str:
        """One line: the headline."""
        return f"<History of {self.headline}>"

    def _repr_html_(self) -> str:
        """The table that notebooks show."""
        columns = [
            name for name in self.columns if name != "penalty" or any(map(bool, self["penalty"]))
        ]
        rows = [[_cell(name, row.get(name, math.nan)) for name in columns] for row in self.epochs]
        if len(rows) > _SHOWN:
            half = _SHOWN // 2
            rows = [*rows[:half], ["…"] * len(columns), *rows[-half:]]
        note = "<p>The training was interrupted.</p>" if self.interrupted else ""
        return html_table(columns, rows) + note

    @property
    def columns(self) -> list[str]:
        """All columns, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.epochs for name in row))

    @property
    def losses(self) -> list[float]:
        """Loss + penalty per epoch."""
        return [row["loss"] + row["penalty"] for row in self.epochs]

    def to_frame(self) -> Any:
        """The epochs as a pandas DataFrame with ``epoch`` as its index.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                "History.to_frame needs pandas, which is not installed: pip install pandas; "
                "history.to_csv(path) writes the same table, and history['loss'] is a list"
            ) from error
        columns = {
            name: [int(v) for v in self[name]] if name in _COUNTS else self[name]
            for name in self.columns
        }
        frame = pandas.DataFrame(columns)
        return frame.set_index("epoch") if "epoch" in columns else frame

    def plot(self, *columns: str, ax: Any = None) -> Any:
        """Draw columns over the epochs with matplotlib.

        Args:
            columns: names of columns; by default loss + penalty of the training and, if there is
                one, the validation loss.
            ax: the matplotlib axes to draw on; by default those of a new figure of pyplot.

        Returns:
            The axes. A notebook cell that ends with this call shows only the figure.

        Raises:
            ArgumentError: ax is something else than axes, such as the path of a picture.
            ConfigError: matplotlib is not installed, or there is no such column.
        """
        for name in columns:
            self._require(name)
        ax = axes_for("History.plot", ax)
        curves = {name: self[name] for name in columns}
        if not columns:
            curves = {"training": self.losses}
            if "validation_loss" in self.columns:
                curves["validation"] = self["validation_loss"]
        for name, values in curves.items():
            ax.plot(range(1, len(values) + 1), values, marker=".", label=name)
        ax.set(xlabel="epoch", ylabel=columns[0] if len(columns) == 1 else "loss" * (not columns))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3)
        if len(curves) > 1:
            ax.legend()
        return ax

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line per epoch."""
        out = io.StringIO()
        writer = csv.DictWriter(out, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        for row in self.epochs:
            writer.writerow({k: int(v) if k in _COUNTS else v for k, v in row.items()})
        write_bytes(Path(path), out.getvalue().encode())


def _cell(name: str, value: float) -> str:
    if math.isnan(value):
        return ""
    return str(int(value)) if name in _COUNTS else f"{value:.5g}"


def risen(first_loss: float | None, history: History) -> tuple[float, float] | None:
    """The two losses if the loss rose tenfold since the first batch, or by half within an epoch.

    None for negative losses, which have no such ratio.
    """
    losses = history.losses
    if not losses or first_loss is None or min(first_loss, losses[0]) <= 0:
        return None
    if losses[-1] > 10 * first_loss:
        return first_loss, losses[-1]
    return (losses[0], losses[-1]) if losses[-1] > 1.5 * losses[0] else None


def axes_for(what: str, ax: Any, otherwise: str = "") -> Any:
    """The axes of a call, by default those of a new figure of pyplot."""
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            needed = f"{what} needs matplotlib: {install_command('plot')}{otherwise}"
            raise ConfigError(needed) from error
        ax = pyplot.subplots(layout="constrained")[1]
        # The figure is displayed by matplotlib, so IPython need not print "<Axes: …>", too.
        ax._ipython_display_ = lambda: None
    if not hasattr(ax, "plot"):
        raise ArgumentError(
            f"{what}: ax: expected axes of matplotlib, got {short_repr(ax)}; plot().figure.savefig(path) "
            "writes a picture"
        )
    return ax
