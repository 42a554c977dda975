"""``ortflex plugins``: the installed plugins, their distributions, and the parameters of one plugin."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, TypedDict

import attrs
import click

from ortflex_core import (
    HOOKS,
    TABLES,
    Entry,
    Kinds,
    PluginError,
    Plugins,
    Registry,
    printable,
    singular,
    suggest,
)
from ortflex_plugins.cli.completion import names_of, word
from ortflex_plugins.cli.terminal import (
    folded,
    folded_table,
    new_table,
    open_console,
    plain,
    show_table,
)

if TYPE_CHECKING:
    from rich.console import Console


class Row(TypedDict):
    """One plugin; ``status`` is ``ok``, ``not loaded`` or the error.

    ``ask_for`` is its unique name: ``distribution/name`` if several plugins have the name. ``home`` is the
    home page of its distribution. ``description``, one line, and ``stability`` (``stable`` or
    ``experimental``) are empty unless the plugin was imported.
    """

    kind: str
    name: str
    ask_for: str
    distribution: str
    version: str
    target: str
    home: str
    description: str
    stability: str
    status: str


def rows(
    found: Plugins, check: bool = False, entries: Collection[Entry] | None = None
) -> list[Row]:
    """Every plugin, or those of some entries; they are imported only with ``check``.

    >>> from ortflex_core import Plugins
    >>> [r["distribution"] for r in rows(Plugins.discover()) if r["name"] == "huber"]
    ['ortflex']
    """
    homes = {name: home_page(name) for name in {e.distribution for r in found for e in r}}
    return [
        Row(
            kind="hooks" if registry.kind == HOOKS else registry.kind,
            name=entry.name,
            ask_for=registry.ask_for(entry),
            distribution=entry.distribution,
            version=entry.version,
            target=entry.target,
            home=homes[entry.distribution],
            **_loaded(registry, entry, check),
        )
        for registry in found
        for entry in registry
        if entries is None or entry in entries
    ]


class Loaded(TypedDict):
    """What is known of a plugin after its import."""

    description: str
    stability: str
    status: str


def _loaded(registry: Registry, entry: Entry, check: bool) -> Loaded:
    found = Loaded(description="", stability="", status="not loaded" if not check else "ok")
    try:
        if check and registry.kind == HOOKS:
            from ortflex_core import HookManager

            HookManager.check(entry)
        elif check:
            loaded = registry.loaded(entry)
            found["description"] = paragraphs(registry, loaded)[0]
            found["stability"] = getattr(loaded, "stability", "stable")
    except PluginError as error:
        found["status"] = str(error)
    return found


@click.command()
@click.argument(
    "what", required=False, metavar="[KIND | NAME]", shell_complete=names_of(words=True)
)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@click.option("--check", is_flag=True, help="Import each plugin and report the broken ones.")
def plugins(what: str | None, as_json: bool, check: bool) -> None:
    """List the installed plugins, the plugins of a kind, or the parameters of a plugin.

    Without an argument, the command lists all installed plugins and the distributions that contain
    them. With a kind, such as `losses` or `loss`, it lists the plugins of this kind. With a name, such
    as `adam`, it shows the description and the parameters of this plugin. With --check, the exit code
    is 1 if a plugin is broken.
    """
    discovered = Plugins.discover()
    if what is not None:
        entries, text = details(discovered, what)
        table = rows(discovered, True, entries)
        if not as_json:
            click.echo(text)
    else:
        table = rows(discovered, check)
        if not as_json:
            _show(table, check)
    broken = [row for row in table if row["status"] not in ("ok", "not loaded")]
    if as_json:
        click.echo(json.dumps(table, indent=2))
    if broken and check:
        raise SystemExit(1)


def _show(found: list[Row], check: bool) -> None:
    console = open_console()
    if _width(found) > console.width:
        _show_names(console, found)
    else:
        _show_table(console, found, check)
    if any(row["ask_for"] != row["name"] for row in found):
        console.print(
            "\nA name with a / belongs to two distributions: use it in this form, or set prefer."
        )
    if not check:
        console.print(
            "\nNothing was imported; --check imports each plugin.\n`ortflex plugins losses` says what the "
            "losses are, `ortflex plugins adam` what\nadam is and which parameters it has."
        )


def _owner(row: Row) -> str:
    return f"{row['distribution']} {row['version']}"


def _width(found: list[Row]) -> int:
    """The width of the table in characters, without the status."""
    cells = [(row["kind"], row["ask_for"], _owner(row), row["target"]) for row in found]
    return sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True))


def _show_names(console: Console, found: list[Row]) -> None:
    """One paragraph for each kind, and one line for each broken plugin."""
    from rich.table import Column

    names: dict[str, list[str]] = {}
    for row in found:
        owner = f" ({_owner(row)})" if row["distribution"] != "ortflex" else ""
        names.setdefault(row["kind"], []).append(plain(row["ask_for"] + owner))
    table = new_table(Column(no_wrap=True), Column(overflow="fold"), show_header=False)
    for kind, plugins_of_kind in names.items():
        table.add_row(f"[bold]{kind}[/]", ", ".join(plugins_of_kind))
    console.print(table)
    for row in found:
        if row["status"] not in ("ok", "not loaded"):
            place = plain(f"{row['kind']} {row['ask_for']} ({_owner(row)})")
            console.print(f"[red]{place}: {plain(row['status'])}[/]")


def _show_table(console: Console, found: list[Row], check: bool) -> None:
    faults = any(row["status"] not in ("ok", "not loaded") for row in found)
    columns = ["kind", "name", "from", "target", *(["status"] if check or faults else [])]
    lines = []
    kind = ""
    for row in found:
        shown = "" if row["kind"] == kind else row["kind"]
        kind = row["kind"]
        good = row["status"] in ("ok", "not loaded")
        status = plain(row["status"])
        status = status if good else f"[red]{status}[/]"
        cells = [shown, *map(plain, (row["ask_for"], _owner(row), row["target"])), status]
        lines.append(cells[: len(columns)])
    show_table(console, columns, lines, long=len(columns) - 3)


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
    from ortflex_core import component_schema

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


def home_page(distribution: str) -> str:
    """The home page in the metadata of a distribution, or an empty string."""
    try:
        metadata = importlib.metadata.metadata(distribution)
        lines = [line.partition(",") for line in metadata.get_all("Project-URL") or ()]
        home = next(iter(metadata.get_all("Home-page") or ()), "")
    except Exception:  # the file is missing, or not UTF-8
        return ""
    pages = {label.strip().lower(): page.strip() for label, _, page in lines}
    known = (pages.get(n) for n in ("homepage", "home", "documentation", "repository", "source"))
    return next(filter(None, known), "") or home or next(iter(pages.values()), "")
