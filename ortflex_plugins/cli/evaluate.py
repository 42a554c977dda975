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
    help="The metric to compute instead of those of the recipe: NAME or OUTPUT=NAME; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@trusting_code
def evaluate(
    run: Path, data: str | None, metrics: tuple[str, ...], as_json: bool, trust_code: bool
) -> None:
    """Print the loss and the metrics of a trained model.

    RUN is a run folder that `ortflex train` wrote, a checkpoint, a folder of checkpoints, a recipe, or
    an .onnx file. If RUN is a folder of checkpoints, the newest one is used. If RUN is a recipe,
    its model is used without training. For an .onnx file, the command uses the loss that `ortflex init`
    suggests.

    DATA is a file or folder in the format of the training data. Without DATA, the command uses the
    validation data of the recipe. If the key `validation` is a fraction, the validation data consists
    of the rows that the run held out. If the recipe has no validation data, its training data is used.

    The command computes the losses and the metrics of the recipe over all rows, in inference mode.
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
