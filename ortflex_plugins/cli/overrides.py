"""Commands that take KEY=VALUE after a recipe."""

from __future__ import annotations

import os

import click


class TakesKeys(click.Command):
    """A command whose error for ``--epochs 3`` says to write ``epochs=3``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; a key given as an option is an error with the right form."""
        import attrs

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from ortflex_core.config import Recipe, translate_key

            key = error.option_name.lstrip("-").replace("-", "_")
            key = translate_key(key)
            if key.partition(".")[0] in attrs.fields_dict(Recipe):
                text = f"{error.option_name} is not an option but a key: write {key}=…"
                raise click.UsageError(text, ctx) from None
            raise


def refuse_recipe(model: str | os.PathLike[str], command: str) -> None:
    """Refuse a recipe where a command takes a model.

    Raises:
        ConfigError: the path ends as recipes do.
    """
    from ortflex_core.errors import ConfigError

    name = os.fspath(model)
    if name.endswith(".toml"):
        raise ConfigError(
            f"{name} is a recipe, and `ortflex {command}` takes the .onnx file that it trains; "
            f"`ortflex train {name}` runs the recipe"
        )
