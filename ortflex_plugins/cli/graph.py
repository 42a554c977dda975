"""``ortflex graph``: a picture of a model, or of the training step of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ortflex_plugins.cli.completion import names_of
from ortflex_plugins.cli.overrides import trusting_code


@click.command()
@click.argument("source", metavar="MODEL", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write: .svg, .html (boxes open on a click) or .png; by default <model>.svg.",
)
@click.option(
    "--training", is_flag=True, help="Draw one training step: forward, loss, backward, update."
)
@click.option(
    "--loss",
    shell_complete=names_of("losses"),
    help="The name of the loss; by default squared_error.",
)
@click.option(
    "--params", multiple=True, help="The name or glob of a trained parameter; may be repeated."
)
@click.option(
    "--fold/--no-fold",
    default=None,
    help="Fold repeated blocks; by default in graphs with more than 24 operators.",
)
@click.option("--unfold", is_flag=True, help="Show the content of folded boxes (svg and png).")
@trusting_code
def graph(
    source: Path,
    output: Path | None,
    training: bool,
    loss: str | None,
    params: Sequence[str],
    fold: bool | None,
    unfold: bool,
    trust_code: bool,
) -> None:
    """Draw MODEL, an .onnx file or a recipe, as SVG, HTML or PNG.

    Colors show what can be trained, what is frozen and what has no gradient. With --training, and for
    graphs that are used for training, they show the forward pass, the loss, the backward pass and the
    update.
    """
    from ortflex_core import Plugins, Recipe, Trainer, printable
    from ortflex_plugins.pictures import draw, draw_step

    target = output or source.with_suffix(".svg")
    plugins = Plugins.discover()
    chosen = list(params) or None
    recipe = None
    if source.suffix == ".toml":
        recipe = Recipe.load(source, plugins=plugins, trust_code=trust_code or None)
    if training:
        if recipe is not None:
            trainer = Trainer.from_recipe(recipe, plugins)
        else:
            trainer = Trainer(
                str(source), loss=loss or "squared_error", params=chosen, plugins=plugins
            )
        picture = draw_step(trainer, fold=fold, unfold=unfold)
    elif recipe is not None:
        picture = draw(
            recipe.model,
            loss=recipe.loss,
            params=recipe.params if chosen is None else chosen,
            fold=fold,
            unfold=unfold,
            plugins=plugins,
        )
    else:
        picture = draw(
            str(source), loss=loss, params=chosen, fold=fold, unfold=unfold, plugins=plugins
        )
    if picture.note:
        click.echo(printable(f"warning: {picture.note}"), err=True)
    picture.save(target)
    click.echo(f"wrote {target}")
