"""``ortflex evaluate``: loss and metrics of a trained model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ortflex_plugins.cli.completion import names_of
from ortflex_plugins.cli.overrides import trusting_code


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("data", required=False)
@click.option(
    "--metric",
    "metrics",
    shell_complete=names_of("metrics"),
    multiple=True,
    help="A metric that replaces the metrics of the recipe: its name, or OUTPUT=NAME; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
@trusting_code
def evaluate(
    run: Path, data: str | None, metrics: tuple[str, ...], as_json: bool, trust_code: bool
) -> None:
    """Print the loss and the metrics of a trained model on data.

    RUN is a folder that `ortflex train` wrote, a checkpoint, a folder of checkpoints (the newest one is
    used), a recipe (its model is evaluated without training), or an .onnx file (with the loss that
    `ortflex init` suggests).
    DATA is a file or folder like the training data; by default, the recipe's validation data (with a
    fraction, the rows that the run held out) or, if it has none, its training data. The losses and
    metrics of the recipe are computed over all rows, in inference mode.
    """
    from ortflex_core import Columns, ConfigError, internals_of
    from ortflex_plugins.cli import trained

    recipe, trainer = trained.open_run(run, metrics, data, trust_code=trust_code)
    what, source = trained.source(recipe, trainer, data)
    needs_labels = internals_of(trainer).setup.needs_labels
    if needs_labels and isinstance(source, Columns) and not source.labels:
        raise ConfigError(f"{what} has no labels; pass an .npz file with X and y")
    scores = trainer.evaluate(source)
    if as_json:
        click.echo(json.dumps({"data": what, **scores}, indent=2))
        return
    click.echo(f"{trained.state(run, trainer)} on {what}")
    for name, value in scores.items():
        click.echo(f"{name} {value:.6g}")
