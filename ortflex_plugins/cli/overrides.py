"""Commands that take a recipe and KEY=VALUE, and the error of commands that take a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ortflex_plugins.cli.completion import overrides

_F = TypeVar("_F", bound=Callable[..., Any])

trusting_code = click.option(
    "--trust-code",
    is_flag=True,
    help=(
        "Import the Python code that a run folder, a checkpoint or a state file refers to. A recipe "
        "outside a run folder does not need this option."
    ),
)
"""The decorator of commands that read such files."""


def output_option(help: str, *, folder: bool = False, **options: Any) -> Callable[[_F], _F]:
    """The decorator of commands with the option -o for a file, or a folder."""
    kind = click.Path(dir_okay=folder, file_okay=not folder, path_type=Path)
    return click.option("-o", "--output", type=kind, help=help, **options)


HEAD = (
    "The number of classes, or their labels, separated by commas. The last layer is replaced with a new "
    "one for these classes."
)
"""The help of the option --head."""


def classes_of(text: str | None) -> int | list[int] | list[str] | None:
    """The value of the argument ``head`` for an option: a number of classes, or their labels.

    >>> classes_of("5"), classes_of("cat, dog"), classes_of("1,3,7")
    (5, ['cat', 'dog'], [1, 3, 7])
    """
    if text is None:
        return None
    labels = [label.strip() for label in text.split(",")]
    numbers = [int(label) for label in labels if re.fullmatch(r"[+-]?\d{1,18}", label)]
    if len(numbers) < len(labels):
        return labels
    return numbers[0] if len(numbers) == 1 else numbers


class RecipeCommand(click.Command):
    """A command with the arguments RECIPE and KEY=VALUE.

    Its error for ``--epochs 3`` says to write ``epochs=3``, and that for a key in place of the recipe
    how to get a recipe.
    """

    def __init__(
        self, name: str | None, *, params: Sequence[click.Parameter] = (), **options: Any
    ) -> None:
        """Put the two arguments before the other parameters."""
        recipe = click.Argument(["recipe"], type=click.Path(path_type=Path))
        keys = click.Argument(
            ["overrides"], nargs=-1, metavar="[KEY=VALUE]...", shell_complete=overrides
        )
        super().__init__(name, params=[recipe, keys, *params], **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; a key given as an option or a recipe is an error with the right form."""
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if (key := _known_key(error.option_name.lstrip("-").replace("-", "_"))) is not None:
                text = f"{error.option_name} is not an option but a key: write {key}=…"
                raise click.UsageError(text, ctx) from None
            raise
        given = str(ctx.params.get("recipe") or "")
        name, sign, _ = given.partition("=")
        if sign and not os.path.lexists(given) and _known_key(name) is not None:
            text = (
                f"the first argument has to be a recipe, but {given!r} is a key with its value: "
                f"write `ortflex {ctx.info_name} RECIPE {given}`; `ortflex init model.onnx` makes a recipe"
            )
            raise click.UsageError(text, ctx)
        return rest


def _known_key(name: str) -> str | None:
    """The key of a recipe that has this name here or in another library; None for any other name."""
    import attrs

    from ortflex_core import Recipe, translate_key

    key = translate_key(name)
    return key if key.partition(".")[0] in attrs.fields_dict(Recipe) else None


def refuse_recipe(model: str | os.PathLike[str], command: str) -> None:
    """Refuse a recipe as the argument of a command that takes a model."""
    from ortflex_core import ConfigError

    name = os.fspath(model)
    if name.endswith(".toml"):
        raise ConfigError(
            f"{name} is a recipe, and `ortflex {command}` takes the .onnx file that it trains; "
            f"`ortflex train {name}` runs the recipe"
        )
