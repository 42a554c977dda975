"""What a reader must hold: ``python -m tests.closure`` measures the structure of the code.

The closure of an import is what a fresh interpreter loads for it: modules and lines of ours. Arrows
are imports between packages, those in functions included, those for type checkers left out; a floor
is the length of the longest chain of arrows below a package; a circle is a set of files that import
one another.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("ortflex_core", "ortflex_plugins")
STOREYS = ("kernel", "compiler", "training", "tools", "testing")
KERNEL = tuple(
    f"ortflex_core.kernel.{name}"
    for name in (
        *("loop", "binder", "registry", "hooks"),
        *("step_protocols", "engine_protocols", "model_protocols"),
    )
)
"""The loop, the binder, the registry, the hooks and all protocols."""
MEASURED = {
    "the kernel: loop, binder, protocols, registry, hooks": KERNEL,
    "the loop": ("ortflex_core.kernel.loop",),
    "the caching binder": ("ortflex_core.kernel.binder",),
    "the loss squared_error": ("ortflex_plugins.losses.regression",),
    "the optimizer adam": ("ortflex_plugins.optimizers.adam",),
    "the Trainer": ("ortflex_core.training.trainer",),
}
_PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]: importlib.import_module(name)
own = ("ortflex_core", "ortflex_plugins")
ours = {n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] in own}
print(json.dumps([ours, sorted({n.partition(".")[0] for n in sys.modules})]))
"""


class Closure(NamedTuple):
    """What an import loads."""

    modules: frozenset[str]
    lines: int
    packages: frozenset[str]
    """The packages of others, and of the standard library."""


def closure(names: Iterable[str]) -> Closure:
    """Import modules in a fresh interpreter, and count what is loaded."""
    command = [sys.executable, "-c", _PROGRAM, *names]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    ours, packages = json.loads(answer.stdout)
    lines = sum(len(Path(file).read_text("utf-8").splitlines()) for file in ours.values())
    return Closure(frozenset(ours), lines, frozenset(packages))


@functools.cache
def modules(package: str) -> dict[str, tuple[Path, ast.Module]]:
    """Every module of a package by its dotted name."""
    out = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        out[name] = path, ast.parse(path.read_text("utf-8"))
    return out


def imported(
    tree: ast.AST, known: Mapping[str, object] = MappingProxyType({}), *, typed: bool = False
) -> Iterator[str]:
    """The modules that code imports, those of ``known`` by their full names.

    Imports in functions count; those for type checkers only if ``typed``.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
        elif typed or not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imported(node, known, typed=typed)


@functools.cache
def imports(*, typed: bool = False) -> dict[str, frozenset[str]]:
    """For every module of both packages, those of ours that it imports, in functions too."""
    known = {name: tree for package in PACKAGES for name, (_, tree) in modules(package).items()}
    return {
        name: frozenset(i for i in imported(tree, known, typed=typed) if i in known and i != name)
        for name, tree in known.items()
    }


def storey(module: str) -> str:
    """The storey of a module of the core; "" of the face and of plugins."""
    parts = module.split(".")
    return parts[1] if parts[0] == "ortflex_core" and parts[1:2] and parts[1] in STOREYS else ""


def package_of(module: str) -> str:
    """The package (the folder) that a module is in."""
    is_package = modules(module.partition(".")[0])[module][0].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


def arrows() -> set[tuple[str, str]]:
    """Imports between packages."""
    pairs = {(package_of(a), package_of(b)) for a, others in imports().items() for b in others}
    return {(a, b) for a, b in pairs if a != b}


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """The sets of at least two nodes that reach one another."""
    reach = {node: _reached(graph, node) for node in graph}
    groups = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in graph}
    return sorted(({*group} for group in groups if len(group) > 1), key=len, reverse=True)


def _reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(graph.get(node, ()))
    return found


def floors(pairs: Iterable[tuple[str, str]]) -> int:
    """The number of packages in the longest chain of arrows; a circle counts once."""
    graph: dict[str, set[str]] = defaultdict(set)
    for a, b in pairs:
        graph[a].add(b)
        graph.setdefault(b, set())
    of_circle = {n: min(c) for c in circles(graph) for n in c}
    small: dict[str, set[str]] = defaultdict(set)
    for a, others in graph.items():
        x = of_circle.get(a, a)
        small[x] |= {of_circle.get(b, b) for b in others} - {x}
    height: dict[str, int] = {}

    def measure(node: str) -> int:
        if node not in height:
            height[node] = 1 + max((measure(b) for b in small[node]), default=0)
        return height[node]

    return max(measure(node) for node in list(small))


def table() -> str:
    """The measurements as a table in Markdown."""
    rows = ["| import | modules of ours | lines | onnx |", "|---|---|---|---|"]
    for what, names in MEASURED.items():
        found = closure(names)
        onnx = "yes" if "onnx" in found.packages else "no"
        rows.append(f"| {what} | {len(found.modules)} | {found.lines:,} | {onnx} |")
    pairs = arrows()
    files = circles(imports())
    lines = sum(
        len(path.read_text("utf-8").splitlines())
        for package in PACKAGES
        for path, _ in modules(package).values()
    )
    rows += [
        "",
        f"{len(pairs)} arrows between packages on {floors(pairs)} floors; "
        f"the largest circle of files has {max((len(c) for c in files), default=0)}; {lines:,} lines.",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
