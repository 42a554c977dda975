"""``ortflex export-step``: the training step of a recipe as files that any onnxruntime runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from ortflex_plugins.cli.overrides import RecipeCommand, output_option, trusting_code


@click.command("export-step", cls=RecipeCommand)
@output_option("The folder to write.", default=Path("step"), show_default=True, folder=True)
@click.option(
    "--rows",
    type=int,
    help="The number of rows in every batch. By default, batches can have any number of rows.",
)
@click.option(
    "--steps-per-run",
    type=int,
    default=1,
    show_default=True,
    help="The number of training steps in one run of the graph.",
)
@click.option(
    "--optional-inputs/--required-inputs",
    default=True,
    help=(
        "Whether the learning rate and the hyperparameters are optional inputs with defaults. JavaScript "
        "does not support optional inputs."
    ),
)
@click.option(
    "--steps-per-epoch",
    type=int,
    help="The number of steps per epoch for the schedule. By default, this number is derived from "
    "the recipe's data.",
)
@click.option(
    "--c",
    "as_c",
    is_flag=True,
    help="Write C code, which needs no runtime. By default, its batches have the batch size of the recipe.",
)
@trusting_code
def export_step(
    recipe: Path,
    overrides: Sequence[str],
    output: Path,
    rows: int | None,
    steps_per_run: int,
    optional_inputs: bool,
    steps_per_epoch: int | None,
    as_c: bool,
    trust_code: bool,
) -> None:
    """Export the training step of a recipe for use with any onnxruntime build, or as C code.

    RECIPE and KEY=VALUE are the same as for `ortflex train`. The command writes step.onnx,
    predict.onnx, state.safetensors and manifest.json to a folder. A loop in Python, JavaScript, C# or
    C++ can then train without ortflex, and `ortflex apply-state` writes the trained weights back into
    the model. Labels and sample weights have the same data types as in the data of the recipe.

    With --c, the command writes step.c, predict.c, step.h, state.h, main.c and a Makefile instead. This
    C99 code trains and predicts without a runtime. It runs on microcontrollers, for example, and any
    language that can call C can use it.
    """
    from ortflex_core import Parts, Plugins, Recipe, Trainer, open_step, printable
    from ortflex_plugins.c.export import export_c

    plugins = Plugins.discover()
    loaded = Recipe.load(recipe, overrides, plugins, trust_code=trust_code or None)
    trainer = Trainer.from_recipe(loaded, plugins)
    source = Parts(trainer.plugins).build("data", loaded.data)
    with tempfile.TemporaryDirectory() as temporary:
        folder = trainer.export_step(
            Path(temporary, "step") if as_c else output,
            source,
            rows=rows or trainer.batch_size if as_c else rows,
            steps_per_run=steps_per_run,
            optional_inputs=optional_inputs,
            steps_per_epoch=steps_per_epoch,
            validation_data=loaded.validation,
        )
        manifest = open_step(folder).manifest
        if as_c:
            export_c(folder, output)
    if manifest.rates is not None:
        steps = manifest.rates.count * manifest.rates.steps
        click.echo(
            f"schedule {trainer.schedule.name}: {manifest.rates.count} rates for {steps} steps"
        )
    for item in manifest.not_portable:
        text = f"not in the step: {item.what} {item.name}: {item.why}; {item.instead}"
        click.echo(printable(text), err=True)
    click.echo(f"wrote {output}")
