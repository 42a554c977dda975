"""``ortflex new-plugin``: a package that passes the checks of its kind unchanged."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from ortflex_plugins.cli.completion import kinds as complete_kinds

KINDS: Mapping[str, tuple[str, str]] = {
    "loss": ("losses", 'Train with it: `loss = "{name}"`.'),
    "penalty": ("penalties", 'Train with it: `penalty = "{name}"`.'),
    "schedule": ("schedules", 'Train with it: `schedule = "{name}"`.'),
    "optimizer": ("optimizers", 'Train with it: `optimizer = "{name}"`.'),
    "adapter": ("adapters", 'Train with it: `adapters = ["{name}"]`.'),
    "transform": ("transforms", 'Train with it: `transforms = ["{name}"]`.'),
    "constraint": ("constraints", 'Train with it: `constraint = "{name}"`.'),
    "average": ("averages", 'Train with it: `averaging = "{name}"`.'),
    "precision": ("precisions", 'Train in it: `precision = "{name}"`.'),
    "metric": ("metrics", 'Use it: `metrics = ["{name}"]`.'),
    "data": ("data", 'Train on it: `data = {{ name = "{name}", path = "numbers.txt" }}`.'),
    "callback": ("callbacks", 'Train with it: `callbacks = ["{name}"]`.'),
    "device": ("devices", 'Train on it: `device = "{name}"`.'),
    "backend": ("backends", 'Train with it: `backend = "{name}"`.'),
    "process_group": ("process_groups", 'Train in it: `distributed = "{name}"`.'),
    "gradient": ("gradients", "The rules are used as soon as the package is installed."),
    "decomposition": ("decompositions", "They are used as soon as the package is installed."),
}
"""Kinds by their names on the command line: the registry's name, and how a plugin is used."""

WORDS = {
    "data": "data source",
    "decomposition": "family of decompositions",
    "gradient": "family of gradient rules",
    "process_group": "process group",
}
_TABLES = {"gradient": "RULES", "decomposition": "DECOMPOSITIONS"}
FOLDER = Path(__file__).parent / "templates"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@click.command("new-plugin")
@click.argument("kind", shell_complete=complete_kinds)
@click.argument("name")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="The folder in which the package's folder is created; by default the current folder.",
)
def new_plugin(kind: str, name: str, output: Path) -> None:
    """Write a package with a plugin of KIND called NAME, and its tests.

    KIND is loss, penalty, schedule, optimizer, adapter, transform, constraint, average, precision,
    metric, data, callback, device, backend, process_group, gradient or decomposition. The plugin works
    as it is: replace its formula with yours.
    """
    from ortflex_core import make_folder, write_bytes

    for path, text in package(kind, name, output / name).items():
        make_folder(path.parent)
        write_bytes(path, text.encode())
    click.echo(
        f"wrote {output / name}; next: cd {output / name}, pip install -e .[test], pytest. "
        f"The {WORDS.get(kind, kind)} is in {name}/{kind}.py"
    )


def package(kind: str, name: str, folder: Path) -> dict[Path, str]:
    """The content of every file of a package in ``folder``.

    Raises:
        ConfigError: the kind is unknown, or the name is invalid or taken.
    """
    from string import Template

    from ortflex_core import ConfigError, Plugins, suggest

    if kind not in KINDS:
        raise ConfigError(f"unknown kind of plugin {kind!r}; {suggest(kind, KINDS)}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a package; expected lower-case letters, digits and _, for "
            f"example {_suggestion(name, kind)!r}"
        )
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"a module {name!r} is already installed; choose another name")
    group, use = KINDS[kind]
    word = WORDS.get(kind, kind)
    registry = Plugins.discover()[group]
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
        "word": word,
        "Word": f"{'An' if word[0] in 'aeiou' else 'A'} {word}",
        "bounds": _bounds(),
        "object": _TABLES.get(kind) or _class(name),
        "use": use.format(name=name),
    }

    def filled(template: str) -> str:
        text = (FOLDER / f"{template}.txt").read_text("utf-8")
        return Template(text).substitute(values)

    return {
        folder / "pyproject.toml": filled("pyproject.toml"),
        folder / "README.md": filled("README.md"),
        folder / name / "__init__.py": f'"""{values["Word"]} for ortflex."""\n',
        folder / name / f"{kind}.py": filled(f"{kind}.py"),
        folder / "tests" / f"test_{name}.py": filled(f"test_{kind}.py"),
    }


def _bounds() -> str:
    """The versions that the package is written for: this one, up to the next that may break it.

    In versions 0.x every minor version may.
    """
    from ortflex_core import __version__

    major, minor = (int(part) for part in __version__.split(".")[:2])
    following = f"0.{minor + 1}" if major == 0 else str(major + 1)
    return f">={major}.{minor},<{following}"


def _class(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _suggestion(name: str, kind: str) -> str:
    suggestion = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return (
        suggestion
        if _NAME.fullmatch(suggestion) and not keyword.iskeyword(suggestion)
        else f"my_{kind}"
    )
