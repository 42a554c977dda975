"""Commands that take KEY=VALUE behind a recipe."""

from __future__ import annotations

import click


class TakesKeys(click.Command):
    """A command whose user may write ``--epochs 3`` for ``epochs=3``, and is told so."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; a key given as an option is an error that says how to give it."""
        import attrs

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from ortflex_core.config import Recipe

            key = error.option_name.lstrip("-").replace("-", "_")
            if key.partition(".")[0] in attrs.fields_dict(Recipe):
                told = f"{error.option_name} is no option but a key: write {key}=…"
                raise click.UsageError(told, ctx) from None
            raise
