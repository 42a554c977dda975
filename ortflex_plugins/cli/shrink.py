"""``ortflex shrink``: a model without the channels that its outputs do not need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ortflex_plugins.cli.overrides import output_option
from ortflex_plugins.cli.terminal import new_table, plain, right

if TYPE_CHECKING:
    from ortflex_core import Array, Plugins, Shrunk


@click.command()
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@output_option(
    "The file to write. By default, `-small` is added to the name of MODEL, as in model-small.onnx."
)
@click.option(
    "--data",
    help="The data file or folder on which to compare the two models. By default, random rows are used.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
def shrink(model: Path, output: Path | None, data: str | None, force: bool) -> None:
    """Remove the channels of MODEL that its outputs do not need.

    A channel of a convolution or matrix product is removed if it is 0 for all inputs, for example after
    training with the constraint `sparsity` and its method `channels`, or if the next layer ignores it.
    The outputs stay the same up to rounding; the command compares them before it writes the file. The
    new file is smaller, and it runs faster in any runtime.
    """
    from ortflex_core import ConfigError, OutputError, Plugins, no_file
    from ortflex_core import shrink as make_smaller

    path = output or model.with_name(f"{model.stem}-small.onnx")
    if path.suffix != ".onnx":
        raise ConfigError(f"{path}: expected a file name that ends with .onnx")
    if not model.is_file():
        raise ConfigError(no_file(model))
    if path.resolve() == model.resolve():
        raise OutputError(f"{path} is the model itself; choose another file: -o small.onnx")
    if path.exists() and not force:
        raise OutputError(f"{path} exists; --force overwrites it, -o FILE writes another one")
    plugins = Plugins.discover()
    rows = None if data is None else _rows(model, data, plugins)
    found = make_smaller(model, inputs=rows, plugins=plugins)
    if found.parameters[0] == found.parameters[1]:
        _explain(found)
        click.echo("no channel can be removed without a change of the outputs; nothing was written")
        return
    found.export(path)
    _show(found)
    _explain(found)
    click.echo(f"wrote {path}")


def _rows(model: Path, data: str, plugins: Plugins) -> Mapping[str, Array]:
    from ortflex_core import Model, Parts, Recipe, Trainer
    from ortflex_plugins.cli.init import suggest_loss
    from ortflex_plugins.cli.quantize import load_rows, model_inputs

    output, *_ = suggest_loss(Model(model, plugins=plugins))
    settings = {"model": str(model), "data": data, "loss": {output: "squared_error"}}
    recipe = Recipe.from_mapping(settings, plugins)
    trainer = Trainer.from_recipe(recipe, plugins)
    parts = Parts(plugins)
    loaded, _ = load_rows(parts, parts.build("data", recipe.data), data)
    return model_inputs(trainer, loaded)


def _show(found: Shrunk) -> None:
    from rich.console import Console

    shown = new_table("layer", "operator", *right("channels", "left"))
    for layer in found.layers:
        if layer.after < layer.before:
            shown.add_row(
                plain(layer.module), layer.operator, f"{layer.before:,}", f"{layer.after:,}"
            )
    console = Console(highlight=False, width=int(os.environ.get("COLUMNS", 100)))
    console.print(shown)
    before, after = found.parameters
    click.echo(f"{before:,} parameters before, {after:,} after ({after / before:.1%})")


def _explain(found: Shrunk) -> None:
    for reason, count in found.kept.items():
        channels = "channel stays" if count == 1 else "channels stay"
        click.echo(plain(f"{count} constant {channels}: {reason}"))
    if found.difference is None:
        click.echo(
            f"note: the outputs were not compared: {plain(found.not_compared)}; pass rows with --data",
            err=True,
        )
    else:
        click.echo(f"largest difference of the outputs: {found.difference:.2g} of the largest one")
