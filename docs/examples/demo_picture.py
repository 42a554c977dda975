"""The picture of the demo: some digits, the guesses of the network, and its losses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

SHOWN = 10
TRAIN, WATCHED, WRONG, QUIET = "#1f77b4", "#ff7f0e", "#c0392b", "#666666"


def draw(
    path: Path,
    *,
    history: Any,
    start: Mapping[str, float],
    images: tuple[Any, Any],
    labels: Any,
    guesses: tuple[Any, Any],
    accuracy: tuple[float, float],
) -> None:
    """Write the PNG; the pairs are (clean, scanned) and (before, after).

    ``start`` has the scores of the validation data before the first step.
    """
    figure = Figure(figsize=(10, 6.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.35))
    _digits(top, images, labels, guesses)
    curves = bottom.subplots(1, 2)
    _losses(curves[0], history, start)
    _accuracies(curves[1], history, start, accuracy)
    figure.savefig(path)


def _digits(figure: Any, images: tuple[Any, Any], labels: Any, guesses: tuple[Any, Any]) -> None:
    """One column per class, with its first digit that was held out."""
    first = [int(np.flatnonzero(labels == k)[0]) for k in range(SHOWN)]
    figure.suptitle("Held-out digits: clean, from the scanner, and what the network reads")
    axes = figure.subplots(2, SHOWN)
    for column, row in enumerate(first):
        for axis, pictures in zip(axes[:, column], images, strict=True):
            axis.imshow(pictures[row].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
        before, after = (int(g[row]) for g in guesses)
        for value, place in ((before, 0.28), (after, 0.72)):
            axes[1, column].text(
                *(place, -0.1, str(value)),
                transform=axes[1, column].transAxes,
                color="black" if value == labels[row] else WRONG,
                fontsize=13,
                fontweight="bold",
                ha="center",
                va="top",
            )
        axes[1, column].set_xlabel("before  after", fontsize=7, color=QUIET, labelpad=20)
    axes[0, 0].set_ylabel("clean")
    axes[1, 0].set_ylabel("scanned")


def _losses(axis: Any, history: Any, start: Mapping[str, float]) -> None:
    epochs = history["epoch"]
    validation = [start["loss"], *history["validation_loss"]]
    axis.plot(epochs, history["loss"], color=TRAIN, label="training")
    axis.plot([0, *epochs], validation, color=WATCHED, label="validation")
    axis.set(title="Loss", xlabel="epoch", ylabel="cross-entropy a row", yscale="log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="upper right")
    rate = axis.twinx()
    rate.plot(epochs, history["rate"], color=QUIET, linewidth=1, linestyle=":")
    rate.set_ylabel("learning rate (dotted)", color=QUIET)
    rate.tick_params(axis="y", colors=QUIET)
    rate.set_ylim(bottom=0)


def _accuracies(
    axis: Any, history: Any, start: Mapping[str, float], accuracy: tuple[float, float]
) -> None:
    epochs = history["epoch"]
    watched = [100 * a for a in (start["accuracy"], *history["validation_accuracy"])]
    axis.plot([0, *epochs], watched, color=WATCHED, label="validation")
    for value, word, style in zip(accuracy, ("before", "after"), ("--", "-"), strict=True):
        axis.axhline(100 * value, color=QUIET, linewidth=1, linestyle=style)
        axis.annotate(
            f"held out, {word}: {value:.1%}",
            (1, 100 * value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 5 if word == "before" else -16),
            textcoords="offset points",
            ha="right",
            color=QUIET,
        )
    axis.set(title="Accuracy on scanned digits", xlabel="epoch", ylabel="percent", ylim=(0, 103))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="center right")
