"""``ortflex apply-state``: a model with the weights that a portable step trained."""

from __future__ import annotations

from pathlib import Path

import click

from ortflex_plugins.cli.overrides import output_option, trusting_code


@click.command("apply-state")
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("state", type=click.Path(path_type=Path))
@output_option("The file to write.", required=True)
@click.option(
    "--strict/--no-strict",
    default=True,
    help="Whether MODEL must have the same graph as the exported model. With --no-strict, it is enough if "
    "the tensors have the same names, types and shapes.",
)
@trusting_code
def apply_state(model: Path, state: Path, output: Path, strict: bool, trust_code: bool) -> None:
    """Write a copy of MODEL with the trained weights from STATE.

    MODEL is the .onnx file whose training step `ortflex export-step` exported. STATE is the
    state.safetensors file with the trained weights, or the folder that contains this file. The result
    is the file that `Trainer.export` would write: MODEL with the trained weights (or their averages, if
    the recipe sets `averaging`) and the new running statistics.
    """
    from ortflex_core import apply_state as apply
    from ortflex_plugins.cli.overrides import refuse_recipe

    refuse_recipe(model, "apply-state")
    apply(model, state, output, strict=strict, trust_code=trust_code)
    click.echo(f"wrote {output}")
