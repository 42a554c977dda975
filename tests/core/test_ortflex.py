"""``import ortflex``: the public names for users, each imported when it is used, and a command line."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ortflex
from ortflex_core import install_command
from tests.core import public_names

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
HEAVY = "numpy onnx onnxruntime sklearn skl2onnx torch pluggy attrs click"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Python in a folder where only the installation leads to ortflex."""
    options = {"capture_output": True, "text": True, "check": False, "timeout": 120}
    return subprocess.run([sys.executable, *arguments], cwd=folder, **options)


def imported_for_type_checkers() -> dict[str, str]:
    """Name: module, in the block that only type checkers read."""
    tree = ast.parse((ROOT / "ortflex.py").read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_the_four_lists_of_names_are_one() -> None:
    """A name that one list lacks would be missing for type checkers, editors or the import."""
    assert imported_for_type_checkers() == ortflex._PLACES
    assert sorted(ortflex.__all__) == sorted([*ortflex._PLACES, "__version__"])
    assert dir(ortflex) == sorted(ortflex.__all__)


@pytest.mark.parametrize(("name", "module"), ortflex._PLACES.items())
def test_each_name_is_the_public_one_of_its_package(name: str, module: str) -> None:
    for package, what in (("sklearn", "estimators"), ("torch", "OrtLayer")):
        if what in (name, module.rpartition(".")[2]):
            pytest.importorskip(package)
    loaded = sys.modules.get(module) or __import__(module, fromlist=[name])
    assert getattr(ortflex, name) is getattr(loaded, name)
    listed = [m for group in public_names.MODULES.values() for m in group.items()]
    known = {m: set(names) or set(__import__(m, fromlist=["x"]).__all__) for m, names in listed}
    assert name in known[module]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'ortflex' has no attribute 'Trainr'"):
        _ = ortflex.Trainr
    with pytest.raises(ImportError, match="cannot import name 'Trainr'"):
        from ortflex import Trainr  # noqa: F401


def test_what_is_not_used_is_not_imported(tmp_path: Path) -> None:
    """The import costs nothing of what it hands on; Trainer costs neither scikit-learn nor torch."""
    code = f"""
import sys, ortflex
heavy = {HEAVY.split()!r}
print([name for name in heavy if name in sys.modules])
ortflex.Trainer
print([name for name in ("sklearn", "skl2onnx", "torch") if name in sys.modules])
"""
    done = run("-c", code, folder=tmp_path)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"], done.stderr


@pytest.mark.parametrize(("name", "package"), [("OrtLayer", "torch"), ("OrtRegressor", "sklearn")])
def test_a_missing_package_is_named_with_its_extra(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import sys; sys.modules[{package!r}] = None\nfrom ortflex import {name}"
    last = run("-c", code, folder=tmp_path).stderr.splitlines()[-1]
    monkeypatch.chdir(tmp_path)
    assert last == (
        f"ImportError: ortflex.{name} needs {package}, which is not installed: "
        f"{install_command(package)}"
    )


def test_python_m_is_the_command_line(tmp_path: Path) -> None:
    """From any folder, as the installation has it, with the exit status of the command."""
    version = run("-m", "ortflex", "--version", folder=tmp_path)
    assert version.stdout == f"ortflex, version {ortflex.__version__}\n"
    plugins = run("-m", "ortflex", "plugins", folder=tmp_path)
    assert "squared_error" in plugins.stdout
    wrong = run("-m", "ortflex", "trian", folder=tmp_path)
    assert wrong.returncode == 2
    assert "Usage: python -m ortflex " in wrong.stderr
    assert "did you mean 'train'?" in wrong.stderr


def test_the_packages_do_not_import_the_module_for_users() -> None:
    for package in ("ortflex_core", "ortflex_plugins"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
                assert "ortflex" not in names, path
