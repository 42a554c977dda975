"""``ortflex plugins``: what is installed, and from where."""

from __future__ import annotations

import json
import sys
from typing import TypedDict

import click

from ortflex_core.errors import PluginError
from ortflex_core.registry import HOOKS, Entry, Plugins, Registry
from ortflex_plugins.cli.terminal import show_table


class Row(TypedDict):
    """One plugin; ``status`` is ``ok``, ``not loaded`` or what is wrong with it."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str
    status: str


def rows(found: Plugins, check: bool = False) -> list[Row]:
    """Every plugin; nothing is imported unless ``check`` asks for it.

    >>> from ortflex_core.registry import Plugins
    >>> [r["distribution"] for r in rows(Plugins.discover()) if r["name"] == "huber"]
    ['ortflex']
    """
    return [
        Row(
            kind="hooks" if registry.kind == HOOKS else registry.kind,
            name=entry.name,
            distribution=entry.distribution,
            version=entry.version,
            target=entry.target,
            status=_status(registry, entry, check),
        )
        for registry in found
        for entry in registry
    ]


def _status(registry: Registry, entry: Entry, check: bool) -> str:
    try:
        if registry.kind != HOOKS:
            registry.entry(entry.name)  # two of the same name
        if not check:
            return "not loaded"
        if registry.kind == HOOKS:
            entry.load()
        else:
            registry.load(entry.name)
    except PluginError as error:
        return str(error)
    return "ok"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--check", is_flag=True, help="Import each plugin and say which are broken.")
def plugins(as_json: bool, check: bool) -> None:
    """List what is installed, and from where.

    Exits with 1 if something is wrong with one of them.
    """
    found = rows(Plugins.discover(), check)
    broken = [row for row in found if row["status"] not in ("ok", "not loaded")]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found, check)
    if broken:
        raise SystemExit(1)


def _show(found: list[Row], check: bool) -> None:
    from rich.console import Console
    from rich.markup import escape

    # What goes through a pipe is searched: no line of it may be folded.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    faults = any(row["status"] not in ("ok", "not loaded") for row in found)
    columns = ["kind", "name", "from", "target", *(["status"] if check or faults else [])]
    lines = []
    kind = ""
    for row in found:
        shown = "" if row["kind"] == kind else row["kind"]
        kind = row["kind"]
        good = row["status"] in ("ok", "not loaded")
        status = escape(row["status"]) if good else f"[red]{escape(row['status'])}[/]"
        owner = f"{row['distribution']} {row['version']}"
        cells = [shown, row["name"], owner, row["target"], status]
        lines.append(cells[: len(columns)])
    show_table(console, columns, lines, long=len(columns) - 3)
    if not check:
        console.print("\nNothing was imported; --check imports each plugin.")
