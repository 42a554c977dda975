"""The house stands as architecture.md says: direction of imports, sizes, and what plugins may import."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from ortflex_core.registry import KINDS
from tests.core import public_names, trainer_signature

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]

# A package of the core imports those before it. The modules that are no packages come first, except
# `moved`, which hands on the names of version 0.1.
ORDER = [
    "views",
    "graph",
    "protocols",
    "process_groups",
    "runtime",
    "opsets",
    "autodiff",
    "onnx_files",
    "model",
    "parameters",
    "adapters",
    "data",
    "problem",
    "programs",
    "engines",
    "reference",
    "config",
    "checkpoints",
    "feed",
    "portable",
    "hub",
    "training",
    "check",
    "comparison",
    "testing",
]
LEAVES = {"cli", "estimators", "flower", "layers", "onnxcustom", "pictures"}
"""Packages of ortflex_plugins that are no kinds of plugins."""
BUDGET = {"file": 450, "package": 3_000, "flat": 2_600}
GENERATED: set[str] = set()


@functools.cache
def modules(package: str) -> dict[str, tuple[Path, ast.Module]]:
    """Every module of a package by its dotted name."""
    out = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        out[name] = path, ast.parse(path.read_text("utf-8"))
    return out


def imported(tree: ast.AST, known: dict[str, tuple[Path, ast.Module]]) -> Iterator[str]:
    """The modules that code imports, those of ``known`` by their full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


class AtRunTime(ast.NodeTransformer):
    """Leaves out what only type checkers see; functions stay, however late they import."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """Drop ``if TYPE_CHECKING:``."""
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def at_run_time(tree: ast.Module) -> ast.Module:
    out: ast.Module = AtRunTime().visit(ast.parse(ast.unparse(tree)))
    return out


def when_loaded(tree: ast.Module) -> ast.Module:
    """What runs when a module is imported: neither functions nor what only type checkers see."""
    body = [n for n in at_run_time(tree).body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return ast.Module(body, [])


def part_of(name: str) -> str:
    """The package of the core that a module is in; of one that is in none, "flat" or its own name."""
    inner = name.split(".")[1] if "." in name else ""
    return inner if inner in ORDER else "flat"


def backwards(tree: ast.Module, name: str) -> list[str]:
    place = part_of(name)
    known = modules("ortflex_core")
    level = ORDER.index(place) if place in ORDER else -1
    return [
        other
        for other in imported(tree, known)
        if other.startswith("ortflex_core.")
        and part_of(other) != "flat"
        and ORDER.index(part_of(other)) > level
    ]


def test_packages_of_the_core_import_in_one_direction() -> None:
    wrong = {
        name: found
        for name, (_, tree) in modules("ortflex_core").items()
        if name != "ortflex_core" and (found := backwards(at_run_time(tree), name))
    }
    assert wrong == {}


def test_imports_for_type_checkers_have_the_same_direction_except_in_protocols_and_hooks() -> None:
    wrong = {
        name: found
        for name, (_, tree) in modules("ortflex_core").items()
        if part_of(name) != "protocols"
        and name not in ("ortflex_core", "ortflex_core.hooks")
        and (found := backwards(tree, name))
    }
    assert wrong == {}


@pytest.mark.parametrize("package", ["ortflex_core", "ortflex_plugins"])
def test_modules_import_one_another_without_a_circle(package: str) -> None:
    known = modules(package)
    graph = {
        name: {i for i in imported(when_loaded(tree), known) if i in known and i != name}
        for name, (_, tree) in known.items()
    }
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def test_the_core_imports_no_plugin() -> None:
    for name, (_, tree) in modules("ortflex_core").items():
        assert not [i for i in imported(tree, {}) if i.startswith("ortflex_plugins")], name


def test_kinds_of_plugins_do_not_import_one_another() -> None:
    """Nor do they import the command line, the estimators, the layers or the pictures."""
    plugins = modules("ortflex_plugins")
    for name, (_, tree) in plugins.items():
        kind = ".".join(name.split(".")[:2])
        if kind.rpartition(".")[2] not in KINDS:
            continue
        own = [i for i in imported(tree, plugins) if i.startswith("ortflex_plugins")]
        assert not [i for i in own if not f"{i}.".startswith(f"{kind}.")], name


def test_plugins_import_only_public_names() -> None:
    """What our own plugins need, anybody's may: each name is on the page of public names."""
    known = modules("ortflex_core")
    wrong = []
    for name, (_, tree) in modules("ortflex_plugins").items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if not node.module.startswith("ortflex_core") or "testing" in node.module:
                continue
            public = listed(node.module)
            wrong += [f"{name}: {node.module}.{a.name}" for a in node.names if a.name not in public]
        wrong += [f"{name}: import {i}" for i in plain_imports(tree) if "." in i and i in known]
    assert wrong == []


def plain_imports(tree: ast.Module) -> list[str]:
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import)]
    return [alias.name for node in nodes for alias in node.names]


def listed(module: str) -> set[str]:
    """The public names of a module of the core."""
    names: set[str] = set()
    for group in public_names.MODULES.values():
        if module in group:
            names |= set(group[module] or importlib.import_module(module).__all__)
    return names | ({"__version__"} if module == "ortflex_core" else set())


def lines(name: str) -> int:
    """The lines of a module, without those that ``python -m tests.core.trainer_signature`` writes."""
    written = [*trainer_signature.signature(), *trainer_signature.args()]
    all_lines = modules("ortflex_core")[name][0].read_text("utf-8").splitlines()
    return len(all_lines) - (len(written) if name == "ortflex_core.training.trainer" else 0)


def test_the_core_keeps_its_budget_of_lines() -> None:
    """Files, packages and the modules that are in none; kits and generated code are not counted."""
    sizes = {
        name: lines(name)
        for name in modules("ortflex_core")
        if not name.startswith("ortflex_core.testing") and name not in GENERATED
    }
    large = {name: size for name, size in sizes.items() if size > BUDGET["file"]}
    packages: dict[str, int] = {}
    for name, size in sizes.items():
        inner = name.split(".")[1] if name.count(".") else ""
        path = ROOT / "ortflex_core" / inner
        key = inner if inner and path.is_dir() else "flat"
        packages[key] = packages.get(key, 0) + size
    large |= {
        name: size
        for name, size in packages.items()
        if size > BUDGET["flat" if name == "flat" else "package"]
    }
    assert large == {}


def test_files_of_tests_are_short() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    sizes = {path.name: len(path.read_text("utf-8").splitlines()) for path in files}
    assert {name: size for name, size in sizes.items() if size > BUDGET["file"]} == {}


def test_every_package_of_the_core_says_what_it_owns() -> None:
    for name in ORDER:
        if (ROOT / "ortflex_core" / name).is_dir():
            text = importlib.import_module(f"ortflex_core.{name}").__doc__ or ""
            assert name == "testing" or "May import:" in text, name


def missing_imports(path: Path) -> list[str]:
    """The names of this project that a module imports when it is loaded, and that do not exist."""
    missing: list[str] = []
    for node in ast.parse(path.read_text("utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        if node.module.partition(".")[0] not in ("ortflex", "ortflex_core", "ortflex_plugins"):
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("ortflex"):
                missing.append(node.module)
            continue  # a package of an extra that is not installed here
        except ImportError:
            continue
        missing += [
            f"{node.module}.{alias.name}"
            for alias in node.names
            if not _has(module, alias.name) and not _is_module(f"{node.module}.{alias.name}")
        ]
    return missing


def _has(module: object, name: str) -> bool:
    try:
        return hasattr(module, name)
    except ImportError:  # of an extra that is not installed here
        return True


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_tests_import_what_there_is() -> None:
    """pytest reports a module of tests with a wrong import as one skipped test."""
    known = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in known
        if "fixtures" not in path.parts and (found := missing_imports(path))
    }
    assert wrong == {}
