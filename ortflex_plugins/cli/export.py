"""``ortflex export``: the trained model of a run or a checkpoint as a file."""

from __future__ import annotations

from pathlib import Path

import click

from ortflex_plugins.cli.overrides import trusting_code


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The .onnx file to write.",
)
@click.option(
    "--checkpoint",
    type=click.Choice(["best", "newest"]),
    help="The checkpoint of a run folder, instead of its trained model.",
)
@click.option(
    "--inference",
    is_flag=True,
    help="Switch BatchNormalization and Dropout to inference mode.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@trusting_code
def export(
    run: Path,
    output: Path,
    checkpoint: str | None,
    inference: bool,
    force: bool,
    trust_code: bool,
) -> None:
    """Write the trained model of a run or a checkpoint.

    RUN is a folder that `ortflex train` wrote, a checkpoint, or a folder of checkpoints (the newest one is
    used). The result is the file that `Trainer.export` writes: the model of the training with its edits,
    adapters and integers, and with the trained weights or their averages. For a run that has not ended, it
    has the weights of the newest checkpoint.
    """
    from ortflex_core import ConfigError
    from ortflex_plugins.cli import trained

    found = trained.find_weights(run, checkpoint)
    if output.exists() and not force:
        raise ConfigError(f"{output} exists and was not changed; overwrite it with --force")
    trained.export(found, output, inference=inference, trust_code=trust_code)
    click.echo(f"wrote {output}, the model of {found}")
