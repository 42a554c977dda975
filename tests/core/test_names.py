"""Names: those that users import, in this version and the one before, and those of plugins.

``import ortflex`` has the public names, each imported when it is used, and a command line. The public
import paths of version 0.2 hand on the names, with a warning. The core knows no plugin by its name: a
default is data in the list of arguments, all else is asked.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ortflex
import ortflex_core
from ortflex_core import (
    KINDS,
    Arguments,
    ConfigError,
    Entry,
    PluginError,
    Plugins,
    Unsupported,
    install_command,
)
from ortflex_core.compiler.problem.losses import penalty_terms, read_penalties
from ortflex_core.kernel import moved
from ortflex_core.training.config.arguments import ASSUMED_LOSS, PLAIN_DESCENT, short_forms
from ortflex_core.training.engines import backend_choice
from ortflex_plugins import moved as moved_plugins
from tests import children
from tests.core import public_names
from tests.training import plugins

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


def run(*arguments: str, folder: Path) -> Any:
    """Python in a folder where only the installation leads to ortflex."""
    return children.run([sys.executable, *arguments], cwd=folder)


def test_the_four_lists_of_names_are_one() -> None:
    """A name that one list lacks would be missing for type checkers, editors or the import."""
    tree = ast.parse((ROOT / "ortflex.py").read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))  # for type checkers only
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {a.name: node.module for node in imports for a in node.names} == ortflex._PLACES
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


@pytest.mark.parametrize(
    ("used", "heavy"),
    [
        ("import ortflex", "numpy onnx onnxruntime sklearn skl2onnx torch pluggy attrs click"),
        ("import ortflex; ortflex.Trainer", "sklearn skl2onnx torch"),
        ("import ortflex_core", "numpy onnx"),
    ],
)
def test_what_is_not_used_is_not_imported(used: str, heavy: str, tmp_path: Path) -> None:
    code = f"{used}; import sys; print([n for n in {heavy.split()} if n in sys.modules])"
    done = run("-c", code, folder=tmp_path)
    assert done.stdout == "[]\n", done.stderr


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


PUBLIC: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "public_names_0_2.json").read_text("utf-8")
)
"""The public names of 0.2 by their modules."""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old names as a process that has imported none of them sees them."""
    for name in list(sys.modules):
        old = name.removeprefix("ortflex_core.")
        if old.partition(".")[0] in moved.MODULES:
            monkeypatch.delitem(sys.modules, name)
            if old in vars(ortflex_core):
                monkeypatch.delattr(ortflex_core, old)


@pytest.mark.parametrize("old", PUBLIC)
@pytest.mark.usefixtures("fresh")
def test_public_names_of_0_2_are_where_they_were(old: str) -> None:
    with pytest.warns(DeprecationWarning, match="ortflex_core"):
        found = {name: getattr(importlib.import_module(old), name) for name in PUBLIC[old]}
    assert found == {name: getattr(ortflex_core, name) for name in PUBLIC[old]}
    with pytest.raises(AttributeError):
        _ = sys.modules[old].no_such_name


@pytest.mark.usefixtures("fresh")
def test_modules_that_moved_are_handed_on_by_the_package_and_inside_of_it() -> None:
    """A pickle names classes by the module that defines them."""
    with pytest.warns(DeprecationWarning, match="ortflex_core.protocols"):
        from ortflex_core import protocols
    assert protocols.Loss is ortflex_core.Loss
    with pytest.warns(DeprecationWarning, match=r"ortflex_core\.views"):
        module = importlib.import_module("ortflex_core.views.history")
    assert module.History is ortflex_core.History


def test_the_new_path_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(hasattr(ortflex_core, name) for names in PUBLIC.values() for name in names)


@pytest.mark.parametrize("old", moved_plugins.PLACES)
def test_modules_of_single_plugins_hand_on_their_family(old: str, monkeypatch: Any) -> None:
    """As classes in pickles and class paths in recipes name them."""
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=re.escape(moved_plugins.PLACES[old])):
        module = importlib.import_module(old)
    name = old.rpartition(".")[2]
    family = [v for v in vars(module).values() if getattr(v, "name", None) == name]
    assert [cls.__module__ for cls in family] == [moved_plugins.PLACES[old]]


def test_metadata_that_is_older_than_the_code_does_not_warn(monkeypatch: Any) -> None:
    old = "ortflex_plugins.optimizers.adamw"
    monkeypatch.delitem(sys.modules, old, raising=False)
    point = importlib.metadata.EntryPoint("adamw", f"{old}:AdamW", "ortflex.optimizers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls = point.load()
    entry = Entry("optimizers", "adamw", point.value, "ortflex", "0.2.0", point)
    assert entry.stands_for(cls)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PLUGINS = {name for group in PROJECT["entry-points"].values() for name in group}
DATA = "training/config/arguments.py"
"""The one module in which a name may stand: the defaults of the arguments."""

# Words that are also something else in the core: what the literal is there.
OTHERWISE = {
    "constant": "a kind of node or tensor",
    "losses": "a kind of plugin",
    "momentum": "an attribute of BatchNormalization",
    "none": "nothing, in a message",
    "reduction": "an argument",
    "shape": "an attribute of tensors",
    "step": "the counter of steps",
}
# What stands elsewhere, and looks no plugin up.
ALLOWED = {
    ("kernel/tracebacks.py", "torch"),  # the package, whose frames are left out
    ("compiler/problem/labels.py", "softmax_cross_entropy"),  # advice to the user
    ("training/engines/failures.py", "causal_lm"),  # the same
    ("training/config/functions.py", "torch"),  # the package, whose components are refused
    ("training/config/functions.py", "entropy"),  # a word in the names of losses of other packages
    ("training/receipt.py", "cpu"),  # a key of receipts: the processor
    ("training/fit.py", "sparsity"),  # a column of the History, for every pruning
    ("compiler/runtime/installation.py", "training_session"),  # a module of onnxruntime
}


def literals(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, docstrings left out."""
    documentation = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if text and id(node) not in documentation:
            yield node.value


def named(source: str) -> set[str]:
    """The plugins that a module names: texts that are a name, and names in texts that are no other word."""
    found = set()
    distinct = {n for n in PLUGINS if "_" in n}
    for text in literals(ast.parse(source)):
        found |= {text} & PLUGINS - set(OTHERWISE)
        found |= set(re.findall(r"\w+", text)) & distinct
    return found


SIGNATURE = "training/trainer.py"
"""It repeats the defaults of the list, which test_arguments.py compares."""
MODULES = {
    path.relative_to(ROOT / "ortflex_core").as_posix(): path
    for path in sorted((ROOT / "ortflex_core").rglob("*.py"))
    if "testing" not in path.parts
}


def test_no_module_names_a_plugin() -> None:
    others = {place: path for place, path in MODULES.items() if place not in (DATA, SIGNATURE)}
    assert {(p, name) for p, path in others.items() for name in named(path.read_text())} == ALLOWED


def test_the_list_names_its_defaults_alone() -> None:
    """A default of the Trainer, what is assumed without one, or an argument that is short for a plugin."""
    fields = Arguments.__attrs_attrs__
    defaults = {field.default for field in fields if isinstance(field.default, str)}
    short = {plugin for kind in KINDS for plugin in short_forms(kind).values()}
    short |= {field.metadata["plugin"] for field in fields}
    for place, more in ((DATA, {ASSUMED_LOSS, PLAIN_DESCENT, *short}), (SIGNATURE, set[str]())):
        assert named(MODULES[place].read_text("utf-8")) <= defaults | more, place


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('x = get("optimizers", "sgd")', {"sgd"}),
        ('"""sgd"""', set()),
        ('def f():\n    "takes sgd"\n    return {"name": "elastic"}', {"elastic"}),
        ('raise E(f"{x}: use squared_error")', {"squared_error"}),
        ('x = "step"', set()),
    ],
)
def test_what_counts_as_a_name(source: str, found: set[str]) -> None:
    assert named(source) == found


def test_words_with_another_meaning_are_names_of_plugins() -> None:
    assert set(OTHERWISE) <= PLUGINS


def test_a_table_without_a_name_means_the_penalty_that_says_so(monkeypatch: Any) -> None:
    """Where no penalty says so, the name is missing."""
    (term,) = penalty_terms(read_penalties({"coef": {"l2": 0.5}}, plugins()), ["coef"])
    assert term.penalty.describe() == {"name": "elastic", "l1": 0.0, "l2": 0.5}
    said = [n for n, cls in plugins()["penalties"].classes() if cls.unnamed is not None]
    assert said == ["elastic"]
    monkeypatch.setattr(type(term.penalty), "unnamed", None)
    with pytest.raises(ConfigError, match=r"penalty\.coef: the key 'name' is missing"):
        read_penalties({"coef": {"l2": 0.5}}, plugins())


def test_comparisons_see_gradients_in_the_steps_of_plain_descent() -> None:
    """w − rate · gradient, without state: what a comparison's probe takes it for."""
    made = plugins().component("optimizers", PLAIN_DESCENT)
    assert made.slots == ()
    assert made.elementwise
    assert made.update(None, 3.0, 2.0, 0.5, {}, 1) == (2.0, {})


def test_without_any_backend_the_error_names_disabled_ones(monkeypatch: Any) -> None:
    owners = {entry.owner for entry in Plugins.discover()["backends"]}
    monkeypatch.setenv("ORTFLEX_DISABLE_PLUGINS", ",".join(owners))
    off = Plugins.discover()
    assert not off["backends"].names()
    with pytest.raises(PluginError, match="ORTFLEX_DISABLE_PLUGINS switches off"):
        backend_choice.load_candidates(off, "auto")
    with pytest.raises(Unsupported, match="no backend is installed"):
        backend_choice.load_candidates(Plugins([]), "auto")
