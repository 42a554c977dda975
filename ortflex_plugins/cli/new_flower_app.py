"""``ortflex new-flower-app``: a project for Flower from a recipe."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ortflex_plugins.cli.overrides import output_option, trusting_code

FOLDER = Path(__file__).parent / "templates" / "flower"
_NAME = re.compile(r"(?=.{1,32}$)[a-z][a-z0-9]*(-[a-z0-9]+)*")  # Flower's rule


@click.command("new-flower-app")
@click.argument("recipe", type=click.Path(path_type=Path))
@output_option(
    "The folder to write. Its name is also the name of the project.",
    default=Path("flower-app"),
    show_default=True,
    folder=True,
)
@trusting_code
def new_flower_app(recipe: Path, output: Path, trust_code: bool) -> None:
    """Create a Flower project that trains RECIPE on many clients.

    RECIPE is a recipe for `ortflex train`. Run the project with `flwr run`. By default, Flower
    simulates the clients on this machine and gives each of them a part of the rows.
    """
    from ortflex_core import install_command, make_folder, write_bytes

    for path, text in project(recipe, output, trust_code=trust_code).items():
        make_folder(path.parent)
        write_bytes(path, text.encode())
    click.echo(
        f"wrote {output}; next, after {install_command('stock', 'flower')}: "
        f'flwr run {output} --federation-config "num-supernodes=3" --stream'
    )


def project(path: Path, folder: Path, *, trust_code: bool = False) -> dict[Path, str]:
    """The files of a project in ``folder``."""
    from string import Template

    from ortflex_core import ConfigError, to_toml

    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a project; expected at most 32 lower-case letters and "
            "digits, joined by '-', for example 'flower-app'"
        )
    if folder.exists():
        raise ConfigError(
            f"{folder} exists and was not changed; choose another folder with --output"
        )
    model, text = _client_recipe(path, trust_code=trust_code)
    package = name.replace("-", "_")
    values = {
        "project": name,
        "package": package,
        "model": model.replace('"', "'"),
        "output": to_toml(str((folder / "trained.onnx").resolve())),
    }

    def filled(template: str) -> str:
        return Template((FOLDER / f"{template}.txt").read_text("utf-8")).substitute(values)

    return {
        folder / "pyproject.toml": filled("pyproject.toml"),
        folder / "README.md": filled("README.md"),
        folder / package / "__init__.py": filled("__init__.py"),
        folder / package / "client_app.py": filled("client_app.py"),
        folder / package / "server_app.py": filled("server_app.py"),
        folder / package / "train.toml": text,
    }


def _client_recipe(path: Path, *, trust_code: bool) -> tuple[str, str]:
    """The name of the model, and the recipe of a client, without callbacks and with absolute paths."""
    import attrs

    from ortflex_core import ConfigError, Recipe

    recipe = Recipe.load(path, trust_code=trust_code or None)
    if recipe.averaging is not None:
        raise ConfigError(
            "averaging: the averages of a client are neither shared nor exported; leave it out of the "
            "recipe, because the strategy averages"
        )
    if recipe.distributed is not None:
        raise ConfigError("distributed: a client trains in one process; leave it out of the recipe")
    client = attrs.evolve(recipe, callbacks=(), output=None, progress=False)
    head = "# The recipe of a client; local-epochs in pyproject.toml replaces epochs.\n\n"
    return Path(recipe.model).name, head + client.to_toml()
