"""The axes of matplotlib that results are drawn on."""

from __future__ import annotations

from typing import Any

from ortflex_core.kernel.errors import ArgumentError, ConfigError, short_repr
from ortflex_core.kernel.install_command import install_command


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
