"""The structure is as architecture.md says: storeys, the closure of the kernel, what plugins may import."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ortflex_core import KINDS
from tests import closure
from tests.closure import STOREYS, imported, modules, storey

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
LONGEST_TEST = 480
"""The lines of a file of tests."""


def upward(name: str, other: str) -> bool:
    """Whether one module of the core imports another one of a later storey."""
    pair = storey(name), storey(other)
    return {*pair} <= {*STOREYS} and STOREYS.index(pair[1]) > STOREYS.index(pair[0])


def test_a_storey_imports_itself_and_those_before_it() -> None:
    """kernel ← compiler ← training ← tools ← testing; imports in functions count."""
    assert storey("ortflex_core.kernel.loop") == "kernel"
    wrong = {(a, b) for a, others in closure.imports().items() for b in others if upward(a, b)}
    assert wrong == set()
    assert [name for name in modules("ortflex_core") if not storey(name)] == ["ortflex_core"]


def test_the_core_imports_neither_its_own_face_nor_plugins() -> None:
    """The face imports everything; only the kits, which are written like plugins, import it."""
    for name, (path, tree) in modules("ortflex_core").items():
        assert not [i for i in imported(tree) if i.startswith("ortflex_plugins")], name
        if storey(name) != "testing":
            assert "ortflex_core" not in imported(tree), (name, path)


def test_files_import_one_another_without_a_circle() -> None:
    """Imports in functions count, too."""
    assert closure.circles(closure.imports()) == []


def test_a_reader_meets_no_large_circle() -> None:
    """Names for type checkers count, except those of a later storey, which protocols have."""
    read = closure.imports(typed=True)
    own = {a: [b for b in others if not upward(a, b)] for a, others in read.items()}
    assert max(map(len, closure.circles(own)), default=0) <= 4


def test_the_arrows_between_packages_stay_few() -> None:
    """0.2 had 320 on 16 floors, in folders of both packages."""
    pairs = closure.arrows()
    assert len(pairs) < 120
    assert closure.floors(pairs) <= 12


def test_the_kernel_fits_into_one_head() -> None:
    """Loop, binder, registry, hooks and all protocols, in a fresh interpreter."""
    kernel = closure.closure(closure.KERNEL)
    assert len(kernel.modules) <= 45
    assert kernel.lines <= 5_000
    assert not kernel.packages & {"onnx", "onnxruntime", "cattrs", "rich", "ortflex_plugins"}
    assert {storey(name) for name in kernel.modules} <= {"kernel", ""}
    for plugin in ("the loss squared_error", "the optimizer adam"):
        assert len(closure.closure(closure.MEASURED[plugin]).modules - kernel.modules) <= 15


def test_the_kernel_trains_alone() -> None:
    """``python -m ortflex_core.kernel`` imports nothing else of ours."""
    loaded = closure.closure(["ortflex_core.kernel.__main__"])
    assert {storey(name) for name in loaded.modules} <= {"kernel", ""}
    assert not loaded.packages & {"onnx", "onnxruntime", "ortflex_plugins"}


def test_kinds_of_plugins_do_not_import_one_another() -> None:
    """Nor do they import the command line, the estimators, the layers or the pictures; libraries may be."""
    plugins = modules("ortflex_plugins")
    for name, (_, tree) in plugins.items():
        kind = ".".join(name.split(".")[:2])
        if kind.rpartition(".")[2] not in KINDS:
            continue
        own = [i for i in imported(tree, plugins) if i.startswith("ortflex_plugins")]
        allowed = (f"{kind}.", "ortflex_plugins.c.", "ortflex_plugins.operators.")
        assert not [i for i in own if not f"{i}.".startswith(allowed)], name


def test_plugins_import_only_public_names() -> None:
    """What our own plugins need, any author may use: each name is one of ortflex_core's own."""
    public = set(importlib.import_module("ortflex_core").__all__)
    wrong = []
    for name, (_, tree) in modules("ortflex_plugins").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wrong += [f"{name}: {a.name}" for a in node.names if a.name[:13] == "ortflex_core."]
            elif isinstance(node, ast.ImportFrom) and node.module:
                wrong += [f"{name}: {node.module}"] * node.module.startswith("ortflex_core.")
                if node.module == "ortflex_core":
                    wrong += [f"{name}: {a.name}" for a in node.names if a.name not in public]
    assert wrong == []


def test_files_of_tests_are_short() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    sizes = {path.name: len(path.read_text("utf-8").splitlines()) for path in files}
    assert {name: size for name, size in sizes.items() if size > LONGEST_TEST} == {}


def test_a_file_of_tests_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    """Not a skip, as for a module of examples whose library is not installed."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_broken.py").write_text("from tests.models import no_such_name")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, run.stdout
    assert "no_such_name" in run.stdout
