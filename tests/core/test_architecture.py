"""docs/explanation/architecture.md is true: who imports whom, and that every module has its place."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from ortflex_core.registry import KINDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"


@functools.cache
def modules(package: str) -> dict[str, ast.Module]:
    """Every module of a package by its dotted name."""
    out = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        out[name] = ast.parse(path.read_text("utf-8"))
    return out


def imported(tree: ast.AST, known: dict[str, ast.Module]) -> Iterator[str]:
    """The modules that code imports, those of ``known`` by their full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def when_loaded(tree: ast.Module) -> ast.Module:
    """What runs when a module is imported: neither functions nor what only type checkers see."""
    body = [
        n
        for n in tree.body
        if not isinstance(n, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))
    ]
    return ast.Module(body, [])


def test_the_core_imports_no_plugin() -> None:
    for name, tree in modules("ortflex_core").items():
        assert not [i for i in imported(tree, {}) if i.startswith("ortflex_plugins")], name


def test_kinds_of_plugins_do_not_import_one_another() -> None:
    plugins = modules("ortflex_plugins")
    for name, tree in plugins.items():
        kind = ".".join(name.split(".")[:2])
        if kind.rpartition(".")[2] not in KINDS:
            continue
        own = [i for i in imported(tree, plugins) if i.startswith("ortflex_plugins")]
        assert not [i for i in own if not f"{i}.".startswith(f"{kind}.")], name


@pytest.mark.parametrize("package", ["ortflex_core", "ortflex_plugins"])
def test_modules_import_one_another_in_one_direction(package: str) -> None:
    known = modules(package)
    graph = {
        name: {i for i in imported(when_loaded(tree), known) if i in known and i != name}
        for name, tree in known.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def test_every_module_of_the_core_has_its_place_in_the_page() -> None:
    table = PAGE.read_text("utf-8").partition("## The modules")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    there = {name.split(".")[1] for name in modules("ortflex_core") if "." in name}
    assert sorted(named) == sorted(there)
