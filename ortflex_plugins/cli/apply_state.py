"""``ortflex apply-state``: a model with the weights that a portable step trained."""

from __future__ import annotations

from pathlib import Path

import click

from ortflex_plugins.cli.overrides import trusting_code


@click.command("apply-state")
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("state", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file to write.",
)
@click.option(
    "--strict/--no-strict",
    default=True,
    help="Whether the graph of MODEL must be that of the exported model, or only its tensors must fit.",
)
@trusting_code
def apply_state(model: Path, state: Path, output: Path, strict: bool, trust_code: bool) -> None:
    """Write the trained weights in STATE into MODEL.

    MODEL is the .onnx file that `ortflex export-step` read. STATE is the file state.safetensors that a
    runner wrote, or the folder of a step. The result is the file that `Trainer.export` would write: it has
    the trained weights (or their averages, if the recipe has `averaging`) and the running statistics, and
    everything else is as in MODEL.
    """
    from ortflex_core import apply_state as apply
    from ortflex_plugins.cli.overrides import refuse_recipe

    refuse_recipe(model, "apply-state")
    apply(model, state, output, strict=strict, trust_code=trust_code)
    click.echo(f"wrote {output}")
