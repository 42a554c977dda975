"""What was written for version 0.1 runs: its import paths, and a package of plugins that uses them."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ortflex_core
from ortflex_core import Trainer, moved
from tests.models import linear
from tests.training import plugins

pytestmark = pytest.mark.once

OLD = Path(__file__).parents[1] / "fixtures" / "written_for_0_1"
PLUGINS = sorted(p.stem for p in (OLD / "ortflex_example_0_1").glob("*.py") if p.stem[0] != "_")
PUBLIC = {
    "compare": ("compare", "Comparison", "Result"),
    "iterables": ("Batches",),
    "ops": ("Ops", "Tensor"),
    "labels": ("float_labels", "float_scores", "integer_labels", "require_range"),
    "cotangents": ("full", "dims", "passed", "unbroadcast"),
    "hookspecs": ("hook", "Hooks", "NAMES"),
    "checkpoint": ("Saved",),
    "pieces": ("Pieces",),
    "hostengine": ("HostEngine",),
    "program": ("Program",),
    "session": ("use_library",),
    "trainer": ("Trainer",),
    # Packages now, which have the same names.
    "config": ("Recipe",),
    "runtime": ("diagnose", "require_runtime", "Runtime"),
    "protocols": ("Loss", "Penalty", "Optimizer", "Backend", "Engine", "Losses", "MetricState"),
    "autodiff": ("Rules", "NodeView"),
    "data": ("Columns", "Batch"),
    "model": ("Model",),
    "problem": ("Problem",),
}
"""The public names of version 0.1 whose modules have moved."""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old names as a process that has imported none of them sees them."""
    for name in list(sys.modules):
        old = name.removeprefix("ortflex_core.")
        if old in moved.MODULES or name.startswith("ortflex_example_0_1"):
            monkeypatch.delitem(sys.modules, name)
            if hasattr(ortflex_core, old):
                monkeypatch.delattr(ortflex_core, old)
    monkeypatch.syspath_prepend(str(OLD))


@pytest.mark.parametrize("old", sorted(moved.MODULES))
@pytest.mark.usefixtures("fresh")
def test_every_module_that_moved_is_found_and_warns(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"ortflex_core.{old} is now"):
        module = importlib.import_module(f"ortflex_core.{old}")
    new = importlib.import_module(f"ortflex_core.{moved.MODULES[old]}")
    names = [name for name in vars(new) if name[0] != "_"]
    assert names
    assert all(getattr(module, name) is getattr(new, name) for name in names)


@pytest.mark.parametrize("old", PUBLIC)
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_public_names_of_0_1_are_where_they_were(old: str) -> None:
    module = importlib.import_module(f"ortflex_core.{old}")
    assert [name for name in PUBLIC[old] if not hasattr(module, name)] == []


@pytest.mark.usefixtures("fresh")
def test_the_package_hands_on_a_module_that_moved() -> None:
    with pytest.warns(DeprecationWarning, match="ortflex_core.labels is now ortflex_core.data"):
        from ortflex_core import labels  # type: ignore[attr-defined]
    assert labels.float_labels


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plugins_written_for_0_1_are_those_written_for_now(name: str) -> None:
    """The same sources but for their imports; classes of the core that they use are the same objects."""
    old = importlib.import_module(f"ortflex_example_0_1.{name}")
    new = importlib.import_module(f"ortflex_example.{name}")
    classes = {n: v for n, v in vars(new).items() if isinstance(v, type) and n[0] != "_"}
    for n, value in classes.items():
        if value.__module__ == new.__name__:
            bases = [base for base in value.__mro__ if base.__module__.startswith("ortflex_core")]
            assert all(issubclass(getattr(old, n), base) for base in bases)
        else:
            assert getattr(old, n) is value


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_training_with_plugins_written_for_0_1() -> None:
    old = importlib.import_module("ortflex_example_0_1.rmsprop")
    model, x, y = linear(3), *data()
    losses = [
        Trainer(
            model, loss="squared_error", optimizer=optimizer, plugins=plugins(), progress=False
        ).fit(x, y)
        for optimizer in (old.RmsProp(), "example_rmsprop")
    ]
    assert losses[0].losses == losses[1].losses


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def test_a_pickle_of_0_1_is_read() -> None:
    """A pickle names classes by module; here one that has moved."""
    from ortflex_core.data import Columns

    made = pickle.dumps(Columns, protocol=0).replace(
        b"ortflex_core.data.columns", b"ortflex_core.data"
    )
    assert pickle.loads(made) is Columns
    moved_name = pickle.dumps(Trainer, protocol=0).replace(
        b"ortflex_core.training.trainer", b"ortflex_core.trainer"
    )
    sys.modules.pop("ortflex_core.trainer", None)
    with pytest.warns(DeprecationWarning, match="ortflex_core.trainer is now"):
        loaded = pickle.loads(moved_name)
    assert loaded is Trainer


def test_importing_the_core_imports_neither_numpy_nor_onnx() -> None:
    code = "import ortflex_core, sys; print(sorted({'numpy', 'onnx'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
