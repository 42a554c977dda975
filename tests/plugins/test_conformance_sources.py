"""Every data source and callback of ours, and of the example distribution, passes the kit of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import CallbackKit, DataSourceKit
from ortflex_core.testing.running import plugins
from tests.plugins.kit_fixtures import component_of, effect_of, gives

pytestmark = pytest.mark.per_python

# Data sources ------------------------------------------------------------------------------------

X = np.arange(12, dtype=np.float64).reshape(6, 2)
Y = np.linspace(-1, 1, 6)


class Rows(DataSourceKit):
    reference = gives({"X": X, "y": Y})


class TestNpz(Rows):
    @pytest.fixture
    def component(self, tmp_path: Path) -> Any:
        np.savez(tmp_path / "data.npz", X=X, y=Y)
        return plugins().component("data", {"name": "npz", "path": str(tmp_path / "data.npz")})


class TestNpy(Rows):
    @pytest.fixture
    def component(self, tmp_path: Path) -> Any:
        for name, array in (("X", X), ("y", Y)):
            np.save(tmp_path / f"{name}.npy", array)
        return plugins().component("data", {"name": "npy", "path": str(tmp_path)})


class TestCsv(Rows):
    @pytest.fixture
    def component(self, tmp_path: Path) -> Any:
        rows = "\n".join(f"{a},{b},{y}" for (a, b), y in zip(X, Y, strict=True))
        (tmp_path / "data.csv").write_text(f"a,b,y\n{rows}\n")
        given = {"name": "csv", "path": str(tmp_path / "data.csv"), "target": "y"}
        return plugins().component("data", given)


class TestLine(DataSourceKit):
    component = component_of("data", "example_line", "ortflex_example", rows=5)

    @pytest.fixture
    def reference(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((5, 3)).astype(np.float32)
        y = x.mean(axis=1, keepdims=True) + 0.1 * rng.standard_normal((5, 1))
        return {"X": x, "y": y}


# Callbacks ---------------------------------------------------------------------------------------


class TestEarlyStopping(CallbackKit):
    watches = False
    component = component_of("callbacks", "early_stopping", patience=2, min_delta=100.0)

    @effect_of
    def effect(self, component: Any, trainer: Any, history: Any) -> None:
        assert len(history) == 3  # one that is the best, two that are no better
        assert component.best_epoch_ == 1


class TestCheckpoint(CallbackKit):
    component = component_of("callbacks", "checkpoint", keep=2)

    @effect_of
    def effect(self, component: Any, trainer: Any, history: Any) -> None:
        found = sorted(p.name for p in (trainer.folder / "checkpoints").iterdir())
        # A training that is resumed from an older checkpoint sets newer ones of its run aside.
        left = [name for name in found if not name.startswith("superseded-")]
        assert left == ["best", "step-000000009", "step-000000012"]


class TestCsvLog(CallbackKit):
    component = component_of("callbacks", "csv_log")

    @effect_of
    def effect(self, component: Any, trainer: Any, history: Any) -> None:
        lines = (trainer.folder / "log.csv").read_text().splitlines()
        assert len(lines) == 1 + len(history)
        assert lines[0].split(",") == history.columns


class TestEpochLine(CallbackKit):
    component = component_of("callbacks", "epoch_line")

    @pytest.fixture
    def effect(self, capsys: Any) -> Any:
        def check(component: Any, trainer: Any, history: Any) -> None:
            assert capsys.readouterr().out.splitlines()[-1].startswith("epoch 4: loss ")

        return check


class TestTensorboard(CallbackKit):
    component = component_of("callbacks", "tensorboard", "tensorboardX", steps=2)

    @effect_of
    def effect(self, component: Any, trainer: Any, history: Any) -> None:
        files = list((trainer.folder / "tensorboard").glob("events.*"))
        assert files
        assert all(f.stat().st_size > 100 for f in files)


class TestStopAfter(CallbackKit):
    watches = False
    component = component_of("callbacks", "example_stop", "ortflex_example", steps=8)

    @effect_of
    def effect(self, component: Any, trainer: Any, history: Any) -> None:
        assert len(history) == 3
        assert history["rows"][-1] == 8
