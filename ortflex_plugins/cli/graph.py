"""``ortflex graph``: a picture of a model, or of the training step of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ortflex_plugins.cli.completion import names_of
from ortflex_plugins.cli.overrides import HEAD, classes_of, output_option, trusting_code


@click.command()
@click.argument("source", metavar="MODEL", type=click.Path(path_type=Path))
@output_option(
    "The file to write: .svg, .html (with boxes that expand when clicked) or .png. By default, an "
    ".svg file next to MODEL, or graph.svg in the run folder."
)
@click.option(
    "--training",
    is_flag=True,
    help="Draw one training step: forward pass, loss, backward pass and update.",
)
@click.option(
    "--loss",
    shell_complete=names_of("losses"),
    help="The name of the loss. By default, squared_error.",
)
@click.option(
    "--params", multiple=True, help="The name or glob of a parameter to train; may be repeated."
)
@click.option("--head", help=HEAD)
@click.option(
    "--fold/--no-fold",
    default=None,
    help="Whether to fold repeated blocks. By default, graphs with more than 24 operators are folded.",
)
@click.option(
    "--unfold", is_flag=True, help="Show the contents of folded boxes in .svg and .png files."
)
@trusting_code
def graph(
    source: Path,
    output: Path | None,
    training: bool,
    loss: str | None,
    params: Sequence[str],
    head: str | None,
    fold: bool | None,
    unfold: bool,
    trust_code: bool,
) -> None:
    """Draw the graph of a model or of a training step as SVG, HTML or PNG.

    MODEL is an .onnx file, a recipe or a run folder. The colors show which operators can be trained,
    which are frozen, and which have no gradient. With --training, or if MODEL is the saved graph of a
    training step, the colors distinguish the forward pass, the loss, the backward pass and the update
    instead. The graph of a recipe or a run includes all edits, such as a new head, and marks them.
    """
    from ortflex_core import Plugins, Recipe, Trainer, printable
    from ortflex_plugins.pictures import draw, draw_step
    from ortflex_plugins.pictures.pages import draw_folder

    is_run = source.is_dir() and (source / "recipe.toml").is_file()
    if is_run and training:
        source, is_run = source / "recipe.toml", False
    target = output or (source / "graph.svg" if is_run else source.with_suffix(".svg"))
    plugins = Plugins.discover()
    chosen = list(params) or None
    recipe = None
    classes = classes_of(head)
    is_recipe = source.suffix == ".toml"
    known = {"--head": classes, "--loss": loss, "--params": chosen if is_run or training else None}
    for option, value in known.items() if is_run or is_recipe else ():
        if value is not None:
            key = option.removeprefix("--")
            raise click.UsageError(f"{option} is for an .onnx file: a recipe has the key {key}")
    if is_recipe:
        recipe = Recipe.load(source, plugins=plugins, trust_code=trust_code or None)
    if training:
        if recipe is not None:
            trainer = Trainer.from_recipe(recipe, plugins)
        else:
            trainer = Trainer(
                str(source),
                loss=loss or "squared_error",
                params=chosen,
                head=classes,
                plugins=plugins,
            )
        picture = draw_step(trainer, fold=fold, unfold=unfold)
    elif recipe is not None:
        picture = draw(
            recipe.model,
            loss=recipe.loss,
            params=recipe.params if chosen is None else chosen,
            freeze=recipe.freeze if chosen is None else (),
            head=recipe.head,
            edits=recipe.edits,
            fold=fold,
            unfold=unfold,
            plugins=plugins,
        )
    elif is_run:
        picture = draw_folder(source, fold=fold, unfold=unfold)
    else:
        picture = draw(
            str(source),
            loss=loss,
            params=chosen,
            head=classes,
            fold=fold,
            unfold=unfold,
            plugins=plugins,
        )
    if picture.note:
        click.echo(printable(f"warning: {picture.note}"), err=True)
    for what, words in picture.changes.items():
        click.echo(printable(f"{what}: {words}"))
    picture.save(target)
    click.echo(f"wrote {target}")
