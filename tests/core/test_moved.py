"""What was written for version 0.2 runs: its public import paths hand on the names, with a warning."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import ortflex_core
from ortflex_core import Entry
from ortflex_core.kernel import moved
from ortflex_plugins import moved as moved_plugins

pytestmark = pytest.mark.once

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
        found = _names(old)
    assert found == {name: getattr(ortflex_core, name) for name in PUBLIC[old]}


def _names(old: str) -> dict[str, object]:
    module = importlib.import_module(old)
    with pytest.raises(AttributeError):
        _ = module.no_such_name
    return {name: getattr(module, name) for name in PUBLIC[old]}


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


def test_importing_the_core_imports_neither_numpy_nor_onnx() -> None:
    code = "import ortflex_core, sys; print(sorted({'numpy', 'onnx'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


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
