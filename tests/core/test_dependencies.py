"""pyproject.toml asks for what is imported, and for nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTED_AS = {
    "scikit-learn": "sklearn",
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "onnxruntime-training": "onnxruntime",
    "onnxruntime-training-cpu": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime",
    "tensorboardx": "tensorboardX",
}
# Installed for a package that imports it without asking for it: what for.
FOR_ANOTHER = {
    "onnxscript": "torch's ONNX exporter",
    "alembic": "mlflow's default store",
    "sqlalchemy": "mlflow's default store",
    "sqlparse": "mlflow's default store",
    "mpich": "the library of mpi4py, and mpiexec",
}
OURS = ("ortflex_core", "ortflex_plugins")
TOOLS = ("docs", "dev")
"""Extras for work on the repository: imported, or named as a tool, in its tests, pages and settings."""


def distributions(requirements: Iterable[str]) -> set[str]:
    return {re.match(r"[\w.-]+", text)[0].lower() for text in requirements}  # type: ignore[index]


def module(distribution: str) -> str:
    return IMPORTED_AS.get(distribution, distribution.replace("-", "_"))


def imported(source: str) -> set[str]:
    """The top-level modules that a source imports, also inside functions and by name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.endswith(("import_module", "importorskip", "find_spec")):
                found.add(str(node.args[0].value))
    return {name.partition(".")[0] for name in found}


def imports(*folders: str) -> set[str]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found: set[str] = set()
    return found.union(*(imported(path.read_text(encoding="utf-8")) for path in paths))


def test_declared_dependencies_are_those_that_are_imported() -> None:
    asked = distributions(PROJECT["dependencies"])
    extras = {
        n: distributions(r) for n, r in PROJECT["optional-dependencies"].items() if n not in TOOLS
    }
    used = imports(*OURS) - set(sys.stdlib_module_names) - {*OURS, "ortflex"}
    assert {d for d in asked if module(d) not in used} == set()
    optional = set[str]().union(*extras.values())
    assert {d for d in optional if module(d) not in used} <= set(FOR_ANOTHER)
    assert used - {module(d) for d in asked | optional} <= UNASKED


UNASKED = {
    "google",  # protobuf, which onnx brings
    "scipy",  # which scikit-learn brings
    "typing_extensions",  # read by type checkers alone, which bring it
    "IPython",  # which the kernel of a notebook has
    "pandas",  # looked at only where a user's data are of it
}


def test_what_is_installed_for_another_package_is_asked_for() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(FOR_ANOTHER) <= set[str]().union(*map(distributions, extras.values()))
    assert not {module(d) for d in FOR_ANOTHER} & imports(*OURS) - {"onnxscript"}


def test_tools_are_used() -> None:
    settings = ("noxfile.py", "pyproject.toml", "docs/conf.py", "tests/conftest.py", "Makefile")
    words = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in settings
        if (ROOT / name).exists()
    }
    words["pyproject.toml"] = words["pyproject.toml"].partition("[tool.")[2]
    text = "\n".join(words.values()).replace("-", "_")
    used = imports("tests", "docs") | imported(words.get("noxfile.py", ""))
    for extra in TOOLS:
        for d in distributions(PROJECT["optional-dependencies"][extra]):
            name = module(d)
            assert name in used or re.search(rf"\b{name}\b|{name.removeprefix('pytest_')}", text), d
