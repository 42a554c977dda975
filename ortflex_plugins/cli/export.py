"""``ortflex export``: the trained model of a run or a checkpoint as a file."""

from __future__ import annotations

from pathlib import Path

import click

from ortflex_plugins.cli.overrides import output_option, trusting_code


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@output_option("The .onnx file to write.", required=True)
@click.option(
    "--checkpoint",
    type=click.Choice(["best", "newest"]),
    help="Export this checkpoint of a run folder instead of its trained model.",
)
@click.option(
    "--inference", is_flag=True, help="Switch BatchNormalization and Dropout to inference mode."
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@trusting_code
def export(
    run: Path, output: Path, checkpoint: str | None, inference: bool, force: bool, trust_code: bool
) -> None:
    """Write the trained model of a run or a checkpoint to a file.

    RUN is a run folder that `ortflex train` wrote, a checkpoint, or a folder of checkpoints, of which
    the newest one is used. If the run has not finished, the command exports the weights of its newest
    checkpoint.

    The file is the same as the one that `Trainer.export` writes. It contains the model after training,
    with all edits, adapters and quantized weights. If the recipe sets `averaging`, the file contains
    the averages of the weights instead of their final values.
    """
    from ortflex_core import ConfigError
    from ortflex_plugins.cli import trained

    found = trained.find_weights(run, checkpoint)
    if output.exists() and not force:
        raise ConfigError(f"{output} exists and was not changed; overwrite it with --force")
    trained.export(found, output, inference=inference, trust_code=trust_code)
    click.echo(f"wrote {output}, the model of {found}")
