"""The descriptions of the plugins of a kind, and the parameters of one plugin."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import attrs

from ortflex_core import (
    HOOKS,
    TABLES,
    Entry,
    Kinds,
    PluginError,
    Plugins,
    Registry,
    component_schema,
    printable,
    singular,
    suggest,
)
from ortflex_plugins.cli.completion import word
from ortflex_plugins.cli.home_page import home_page
from ortflex_plugins.cli.terminal import folded, folded_table


def details(plugins: Plugins, what: str) -> tuple[list[Entry], str]:
    """The entries of a kind or of a name, and their description."""
    kind = kind_of(what, plugins.kinds)
    if kind is not None:
        registry = plugins[kind]
        return list(registry), _kind(registry)
    low = what.lower()
    entries = ((r, e) for r in plugins if r.kind != HOOKS for e in r)
    named = [(r, e) for r, e in entries if low in (e.name.lower(), e.qualified.lower())]
    aliased = [
        (singular(registry.kind), called)
        for registry in plugins
        if registry.kind != HOOKS
        for called, plugin in registry.classes()
        if low in getattr(plugin, "aliases", ())
    ]
    if not named:
        known = [*plugins.kinds, *(entry.name for registry in plugins for entry in registry)]
        for _, called in aliased:
            raise PluginError(f"no plugin is called {what!r}; its name in ortflex is {called!r}")
        hint = suggest(what, known, listing="`ortflex plugins` lists all")
        raise PluginError(f"neither a kind of plugins nor a plugin is called {what!r}; {hint}")
    texts = ["\n".join(_plugin(registry, entry)) for registry, entry in named]
    texts += [
        f"{what} is also another name of the {kind} {called}: `ortflex plugins {called}`"
        for kind, called in aliased
    ]
    return [entry for _, entry in named], "\n\n".join(texts)


def kind_of(what: str, kinds: Kinds) -> str | None:
    """The kind of a name in the singular or the plural, None if there is no such kind.

    >>> from ortflex_core import KINDS
    >>> [kind_of(word, KINDS) for word in ("losses", "Loss", "penalty", "adam")]
    ['losses', 'losses', 'penalties', None]
    """
    low = what.lower()
    return next((kind for kind in kinds if low in (kind, singular(kind), word(kind))), None)


def _kind(registry: Registry) -> str:
    table = []
    for entry in registry:
        try:
            loaded = registry.loaded(entry)
            line = paragraphs(registry, loaded)[0]
            if getattr(loaded, "stability", "stable") != "stable":
                line += f" ({loaded.stability})"
        except PluginError as error:
            line = f"broken: {error}"
        foreign = entry.distribution != "ortflex"
        line += f" ({entry.distribution} {entry.version})" if foreign else ""
        table.append([registry.ask_for(entry), line])
    first = next(iter(registry), None)
    hint = (
        f"\n\n`ortflex plugins {first.name}` shows the parameters of {first.name}" if first else ""
    )
    return folded_table(["name", "what it is"], table) + hint


def _plugin(registry: Registry, entry: Entry) -> Iterator[str]:
    name = registry.ask_for(entry)
    yield printable(
        f"{name} ({singular(registry.kind)}, from {entry.distribution} {entry.version})"
    )
    loaded = registry.loaded(entry)
    if getattr(loaded, "stability", "stable") != "stable":
        yield f"{loaded.stability}: its parameters and results may change in any version"
    if home := home_page(entry.distribution):
        yield f"home page: {printable(home)}"
    for paragraph in paragraphs(registry, loaded):
        yield ""
        yield folded(printable(paragraph))
    if not (isinstance(loaded, type) and attrs.has(loaded)):
        return
    schema = component_schema(loaded)
    yield ""
    table = []
    for field in schema:
        given = field["default"]
        default = repr(given) if isinstance(given, str) else f"{given}"
        default = "required" if field["required"] else default
        kind = " ".join(filter(None, [field["type"], field["range"]]))
        table.append([field["name"], default, kind, field["help"]])
    columns = ["parameter", "default", "type", "meaning"]
    yield folded_table(columns, table) if schema else "no parameters"
    if registry.kind == "optimizers":
        yield ""
        yield folded(
            "The learning rate is an argument of Trainer and a key of a recipe: learning_rate=0.01"
        )


def paragraphs(registry: Registry, loaded: Any) -> list[str]:
    """The paragraphs of the description as one line each, without sections, examples and markup."""
    if registry.kind in TABLES:
        names = sorted(operator for _, operator in loaded.table)
        return [f"{registry.kind} of {', '.join(names)}"]
    out = []
    for paragraph in inspect.cleandoc(loaded.__doc__ or "").split("\n\n"):
        if re.match(r"(Args|Raises|Returns|Example|Source|Attributes)s?:|>>>", paragraph):
            continue
        out.append(
            " ".join(re.sub(r":\w+:`~?([^`]+)`", r"\1", paragraph).replace("``", "").split())
        )
    return out or ["no description"]
