"""The entrances of ortflex: every public function, method and command that takes a file or a folder.

They are listed from the signatures of the public names and from the commands themselves, so that a
test can ask for each of them, and a new one is not forgotten.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import attrs
import click

from ortflex_core import HOOKS, Plugins
from ortflex_core.kernel.entries import OURS
from ortflex_plugins.cli.main import COMMANDS, main
from tests.core import public_names

_PLACES = {"path", "folder", "file", "filename", "repo_id", "model", "source", "data", "recipe"}
"""Parameters with these names may be paths, if their type is a string or open."""


def of_python() -> Iterator[str]:
    """``Trainer.resume(folder)``: the parameters of public names that are files or folders."""
    seen = set()
    for group in public_names.MODULES.values():
        for module, names in group.items():
            if module == "ortflex" or module.startswith("ortflex_core.testing"):
                continue  # names of other modules; kits, which get the folders of their tests
            loaded = importlib.import_module(module)
            for name in names or loaded.__all__:
                if name == "OrtLayer":  # it imports torch, and passes its model to OnnxFunction
                    continue
                for function in _functions(getattr(loaded, name)):
                    seen |= set(_places(function))
    yield from sorted(seen)


def _functions(value: Any) -> Iterator[Any]:
    if inspect.isfunction(value):
        yield value
    elif inspect.isclass(value):
        for name in dir(value):
            if name == "__init__" or not name.startswith("_"):
                held = inspect.getattr_static(value, name)
                yield getattr(held, "__func__", held)


def _places(function: Any) -> Iterator[str]:
    if not inspect.isfunction(function) or not function.__module__.startswith("ortflex"):
        return
    if function.__module__.startswith("ortflex_core.testing"):  # a kit writes its own files
        return
    function = inspect.unwrap(function)
    name = function.__qualname__.removesuffix(".__init__")
    for parameter in inspect.signature(function).parameters.values():
        kind = str(parameter.annotation)
        is_open = kind in ("Any", "str", "str | None", str(inspect.Parameter.empty))
        if "Path" in kind or "Source" in kind or (is_open and parameter.name in _PLACES):
            yield f"{name}({parameter.name})"


def of_commands() -> Iterator[str]:
    """``train --resume``: the arguments and options of commands that are files or folders."""
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter.type, click.Path) or parameter.name in _PLACES:
                yield f"{name} {parameter.opts[-1]}"


def of_components() -> Iterator[str]:
    """``data npz.path``: the fields of our plugins that are files or folders."""
    for registry in Plugins.discover():
        if registry.kind == HOOKS:
            continue
        for entry in registry:
            if entry.owner != OURS:
                continue
            found = registry.loaded(entry)
            # Families of rules and decompositions are objects; older versions of attrs take classes only.
            if not attrs.has(cls := found if isinstance(found, type) else type(found)):
                continue
            for field in attrs.fields(cls):
                if field.name in (*_PLACES, "init", "tokenizer", "vocabulary", "directory", "uri"):
                    yield f"{registry.kind} {entry.name}.{field.name}"
