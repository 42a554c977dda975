"""``ortflex find-rate``: a sweep over learning rates, with a suggestion."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ortflex_plugins.cli.overrides import RecipeCommand, output_option, trusting_code
from ortflex_plugins.cli.terminal import new_table, right

if TYPE_CHECKING:
    from ortflex_core import RateSweep

_SHOWN = 20
"""The number of lines of the table."""
_BAR = 40
_PICTURES = (".svg", ".png", ".pdf")


@click.command(cls=RecipeCommand)
@click.option(
    "--start", type=float, default=1e-7, show_default=True, help="The first learning rate."
)
@click.option("--end", type=float, default=10.0, show_default=True, help="The last learning rate.")
@click.option("--steps", type=int, default=100, show_default=True, help="The number of steps.")
@output_option(
    "A file for the results of all steps: a .csv table, or an .svg, .png or .pdf plot, which needs "
    "matplotlib."
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@trusting_code
def find_rate(
    recipe: Path,
    overrides: Sequence[str],
    start: float,
    end: float,
    steps: int,
    output: Path | None,
    force: bool,
    trust_code: bool,
) -> None:
    """Suggest a learning rate for a recipe.

    The command runs a short training in which the learning rate rises exponentially. It prints the
    losses and suggests the learning rate at which the loss has fallen by a quarter of its total
    decrease. The recipe, the model and earlier runs are not changed. RECIPE and KEY=VALUE are the same
    as for `ortflex train`.
    """
    from ortflex_core import ConfigError, OutputError, Parts, Plugins, Recipe, Trainer

    if output is not None and output.suffix not in (".csv", *_PICTURES):
        endings = ", ".join((".csv", *_PICTURES))
        raise ConfigError(f"{output}: expected a file name that ends with {endings}")
    plugins = Plugins.discover()
    loaded = Recipe.load(recipe, overrides, plugins, trust_code=trust_code or None)
    trainer = Trainer.from_recipe(loaded, plugins)
    data = Parts(trainer.plugins).build("data", loaded.data)
    if output is not None and output.exists() and not force:
        raise OutputError(f"{output} exists; --force overwrites it")
    sweep = trainer.find_rate(data, start=start, end=end, steps=steps)
    if trainer.rank:
        return
    _show(sweep)
    if sweep.suggestion is None:
        wider = f"--end {end * 100:g}" if not sweep.diverged else f"--start {start / 100:g}"
        click.echo(
            f"no suggestion: the loss does not fall at these rates; try {wider}, or --steps {2 * steps}"
        )
    else:
        given = [text for text in overrides if not text.startswith("learning_rate=")]
        rate = f"learning_rate={sweep.suggestion:.2g}"
        words = ["ortflex", "train", str(recipe), *given, rate, *["--trust-code"] * trust_code]
        click.echo(f"suggestion: {shlex.join(words)}")
    if output is not None:
        _write(sweep, output)
        click.echo(f"wrote {output}")


def _show(sweep: RateSweep) -> None:
    """A table of some of the steps; the bars are the smoothed losses."""
    from rich.console import Console

    smoothed, count = sweep.smoothed, len(sweep)
    chosen = sorted({round(k * (count - 1) / (_SHOWN - 1)) for k in range(_SHOWN)})
    lowest, highest = sweep.span
    room = highest - lowest or 1.0
    table = new_table(*right("rate", "loss"), "")
    for k in chosen:
        part = min(1.0, max(0.0, (smoothed[k] - lowest) / room))
        table.add_row(f"{sweep.rates[k]:.2e}", f"{smoothed[k]:.5g}", "█" * round(_BAR * part))
    Console(highlight=False).print(table)
    if sweep.diverged:
        click.echo(f"the loss diverged after {count} steps, at {sweep.rates[-1]:.3g}")


def _write(sweep: RateSweep, path: Path) -> None:
    from ortflex_core import ConfigError, install_command, write_bytes

    if path.suffix == ".csv":
        sweep.to_csv(path)
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"{path}: a picture needs matplotlib: {install_command('plot')}; .csv needs nothing"
        ) from error
    figure = Figure(layout="constrained")
    sweep.plot(figure.subplots())
    out = io.BytesIO()
    figure.savefig(out, format=path.suffix[1:])
    write_bytes(path, out.getvalue())
