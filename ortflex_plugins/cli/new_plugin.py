"""``ortflex new-plugin``: a package that passes the checks of its kind unchanged."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ortflex_plugins.cli.completion import kinds as complete_kinds
from ortflex_plugins.cli.completion import word
from ortflex_plugins.cli.overrides import output_option

if TYPE_CHECKING:
    from ortflex_core import Plugins

_TABLES = {"gradients": "RULES", "decompositions": "DECOMPOSITIONS"}
FOLDER = Path(__file__).parent / "templates"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@click.command("new-plugin")
@click.argument("kind", shell_complete=complete_kinds)
@click.argument("name")
@output_option(
    "The folder in which to create the package. By default, the current folder.",
    default=Path(),
    folder=True,
)
def new_plugin(kind: str, name: str, output: Path) -> None:
    """Create a package that contains a new plugin called NAME and its tests.

    KIND is `loss`, `penalty`, `schedule`, `optimizer`, `edit`, `quantizer`, `adapter`, `transform`,
    `constraint`, `average`, `precision`, `metric`, `data`, `callback`, `device`, `backend`,
    `process_group`, `gradient`, `decomposition`, or a kind that another package adds. The generated
    plugin works as is; replace its formula with your own.
    """
    from ortflex_core import make_folder, write_bytes

    files = package(kind, name, output / name)
    for path, text in files.items():
        make_folder(path.parent)
        write_bytes(path, text.encode())
    click.echo(
        f"wrote {output / name}; next: cd {output / name}, pip install -e .[test], pytest. "
        f"The {kind.replace('_', ' ')} is in {name}/{list(files)[-2].name}"
    )


def package(kind: str, name: str, folder: Path) -> dict[Path, str]:
    """The content of every file of a package in ``folder``."""
    from string import Template

    from ortflex_core import ConfigError, Plugins, singular, suggest

    plugins = Plugins.discover()
    words = {word(plural): plural for plural in plugins.kinds}
    if kind not in words:
        raise ConfigError(f"unknown kind of plugin {kind!r}; {suggest(kind, words)}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a package; expected lower-case letters, digits and _, for "
            f"example {_suggestion(name, kind)!r}"
        )
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"a module {name!r} is already installed; choose another name")
    group = words[kind]
    registry, templates = plugins[group], _templates(plugins, group)
    if name in registry:
        owners = " and ".join(e.distribution for e in registry if e.name == name)
        raise ConfigError(
            f"a {kind} {name!r} is already installed, from {owners}; choose another name"
        )
    if folder.exists():
        raise ConfigError(f"{folder} exists and was not changed; choose another name or folder")
    values = {
        "name": name,
        "project": name.replace("_", "-").strip("-"),
        "kind": group,
        "module": kind,
        "word": singular(group),
        "Word": f"{'An' if kind[0] in 'aeiou' else 'A'} {singular(group)}",
        "bounds": _bounds(),
        "object": _TABLES.get(group) or "".join(part.capitalize() for part in name.split("_")),
        "use": _use(group, name),
    }

    def filled(template: str, folder: Path = FOLDER) -> str:
        text = (folder / f"{template}.txt").read_text("utf-8")
        return Template(text).substitute(values)

    return {
        folder / "pyproject.toml": filled("pyproject.toml"),
        folder / "README.md": filled("README.md"),
        folder / name / "__init__.py": f'"""{values["Word"]} for ortflex."""\n',
        folder / name / f"{kind}.py": filled(f"{kind}.py", templates),
        folder / "tests" / f"test_{name}.py": filled(f"test_{kind}.py", templates),
    }


def _templates(plugins: Plugins, kind: str) -> Path:
    """The folder with the templates of a kind: ours, or ``templates`` next to its base class."""
    from ortflex_core import KINDS, ConfigError

    if kind in KINDS:
        return FOLDER
    module = sys.modules[plugins.kinds[kind].__module__]
    folder = Path(str(module.__file__)).parent / "templates"
    names = (f"{word(kind)}.py.txt", f"test_{word(kind)}.py.txt")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"there is no template of a {word(kind)}: {folder} lacks {' and '.join(missing)}, which belong "
            f"to {module.__name__}"
        )
    return folder


def _use(kind: str, name: str) -> str:
    """How a plugin of a kind is used: the argument that takes it, and its value."""
    from ortflex_core import TABLES, kinds_of_plugins, takes_several

    if kind in TABLES:
        return "It is used as soon as the package is installed."
    if kind == "data":
        return f'Train on it: `data = {{ name = "{name}", path = "numbers.txt" }}`.'
    argument = {of: argument for argument, of in kinds_of_plugins().items()}.get(kind)
    if argument is None:
        return f"`ortflex plugins {name}` describes it."
    value = f'["{name}"]' if takes_several(argument) else f'"{name}"'
    return f"Train with it: `{argument} = {value}`."


def _bounds() -> str:
    """The versions that the package is written for: this one, up to the next that may break it.

    In versions 0.x every minor version may.
    """
    from ortflex_core import __version__

    major, minor = (int(part) for part in __version__.split(".")[:2])
    following = f"0.{minor + 1}" if major == 0 else str(major + 1)
    return f">={major}.{minor},<{following}"


def _suggestion(name: str, kind: str) -> str:
    suggestion = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    valid = _NAME.fullmatch(suggestion) and not keyword.iskeyword(suggestion)
    return suggestion if valid else f"my_{kind}"
