"""The descriptions of the plugins of a kind, and the parameters of one plugin."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
from ortflex_plugins.cli.terminal import folded, folded_table

if TYPE_CHECKING:
    from ortflex_plugins.cli.plugins import Row


def details(plugins: Plugins, rows: list[Row], what: str) -> tuple[list[Row], str]:
    """The rows of a kind or of a name, and their description.

    Raises:
        PluginError: neither a kind nor a plugin has this name.
    """
    kind = kind_of(what, plugins.kinds)
    if kind is not None:
        registry = plugins[kind]
        return [row for row in rows if row["kind"] == kind], _kind(registry)
    named = [(r, e) for r in plugins if r.kind != HOOKS for e in r if _is(e, what)]
    if not named:
        known = [*plugins.kinds, *(entry.name for registry in plugins for entry in registry)]
        for registry in plugins:
            for called, plugin in registry.classes() if registry.kind != HOOKS else ():
                if what.lower() in getattr(plugin, "aliases", ()):
                    raise PluginError(
                        f"no plugin is called {what!r}; its name in ortflex is {called!r}"
                    )
        hint = suggest(what, known, listing="`ortflex plugins` lists all")
        raise PluginError(f"neither a kind of plugins nor a plugin is called {what!r}; {hint}")
    chosen = {(registry.kind, entry.target, entry.owner) for registry, entry in named}
    kept = [r for r in rows if any((r["kind"], r["target"]) == (k, t) for k, t, _ in chosen)]
    return kept, "\n\n".join("\n".join(_plugin(registry, entry)) for registry, entry in named)


def kind_of(what: str, kinds: Kinds) -> str | None:
    """The kind of a name in the singular or the plural, None if there is no such kind.

    >>> from ortflex_core import KINDS
    >>> [kind_of(word, KINDS) for word in ("losses", "Loss", "penalty", "adam")]
    ['losses', 'losses', 'penalties', None]
    """
    low = what.lower()
    return next((kind for kind in kinds if low in (kind, singular(kind), word(kind))), None)


def _is(entry: Entry, what: str) -> bool:
    return what.lower() in (entry.name.lower(), entry.qualified.lower())


def _kind(registry: Registry) -> str:
    table = []
    for entry in registry:
        try:
            line = _paragraphs(registry, registry.loaded(entry))[0]
        except PluginError as error:
            line = f"broken: {error}"
        foreign = entry.distribution != "ortflex"
        line += f" ({entry.distribution} {entry.version})" if foreign else ""
        table.append([registry.ask_for(entry), line])
    first = next(iter(registry), None)
    hint = f"\n\n`ortflex plugins {first.name}` has the parameters of {first.name}" if first else ""
    return folded_table(["name", "what it is"], table) + hint


def _plugin(registry: Registry, entry: Entry) -> Iterator[str]:
    name = registry.ask_for(entry)
    yield printable(
        f"{name} ({singular(registry.kind)}, from {entry.distribution} {entry.version})"
    )
    loaded = registry.loaded(entry)
    for paragraph in _paragraphs(registry, loaded):
        yield ""
        yield folded(printable(paragraph))
    if not (isinstance(loaded, type) and attrs.has(loaded)):
        return
    schema = component_schema(loaded)
    yield ""
    table = []
    for field in schema:
        default = "required" if field["required"] else _short(field["default"])
        kind = " ".join(filter(None, [field["type"], field["range"]]))
        table.append([field["name"], default, kind, field["help"]])
    columns = ["parameter", "default", "type", "meaning"]
    yield folded_table(columns, table) if schema else "no parameters"
    if registry.kind == "optimizers":
        yield ""
        yield folded(
            "The learning rate is an argument of Trainer and a key of a recipe: learning_rate=0.01"
        )


def _paragraphs(registry: Registry, loaded: Any) -> list[str]:
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


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, str) else f"{value}"
