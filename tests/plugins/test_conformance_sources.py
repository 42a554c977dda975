"""Every data source and callback of ours, and of the example distribution, passes the kit of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import CallbackKit, DataSourceKit
from ortflex_core.testing.running import plugins

pytestmark = pytest.mark.per_python

# Data sources ------------------------------------------------------------------------------------

X = np.arange(12, dtype=np.float64).reshape(6, 2)
Y = np.linspace(-1, 1, 6)


class TestNpz(DataSourceKit):
    @pytest.fixture
    def component(self, tmp_path: Path) -> Any:
        np.savez(tmp_path / "data.npz", X=X, y=Y)
        return plugins().component("data", {"name": "npz", "path": str(tmp_path / "data.npz")})

    @pytest.fixture
    def reference(self) -> Any:
        return {"X": X, "y": Y}


class TestNpy(DataSourceKit):
    @pytest.fixture
    def component(self, tmp_path: Path) -> Any:
        for name, array in (("X", X), ("y", Y)):
            np.save(tmp_path / f"{name}.npy", array)
        return plugins().component("data", {"name": "npy", "path": str(tmp_path)})

    @pytest.fixture
    def reference(self) -> Any:
        return {"X": X, "y": Y}


class TestCsv(DataSourceKit):
    @pytest.fixture
    def component(self, tmp_path: Path) -> Any:
        rows = "\n".join(f"{a},{b},{y}" for (a, b), y in zip(X, Y, strict=True))
        (tmp_path / "data.csv").write_text(f"a,b,y\n{rows}\n")
        given = {"name": "csv", "path": str(tmp_path / "data.csv"), "target": "y"}
        return plugins().component("data", given)

    @pytest.fixture
    def reference(self) -> Any:
        return {"X": X, "y": Y}


class TestParquet(DataSourceKit):
    @pytest.fixture(params=["parquet", "arrow"])
    def component(self, tmp_path: Path, request: Any) -> Any:
        pyarrow = pytest.importorskip("pyarrow")
        path = str(tmp_path / f"data.{request.param}")
        table = pyarrow.table({"a": X[:, 0], "b": X[:, 1], "y": Y})
        if request.param == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            pytest.importorskip("pyarrow.feather").write_feather(table, path)
        return plugins().component("data", {"name": request.param, "path": path})

    @pytest.fixture
    def reference(self) -> Any:
        return {"X": X, "y": Y}


class TestLine(DataSourceKit):
    @pytest.fixture
    def component(self) -> Any:
        pytest.importorskip("ortflex_example")
        return plugins().component("data", {"name": "example_line", "rows": 5})

    @pytest.fixture
    def reference(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((5, 3)).astype(np.float32)
        y = x.mean(axis=1, keepdims=True) + 0.1 * rng.standard_normal((5, 1))
        return {"X": x, "y": y}


# Callbacks ---------------------------------------------------------------------------------------


class TestEarlyStopping(CallbackKit):
    watches = False

    @pytest.fixture
    def component(self) -> Any:
        given = {"name": "early_stopping", "patience": 2, "min_delta": 100.0}
        return plugins().component("callbacks", given)

    @pytest.fixture
    def effect(self) -> Any:
        def check(component: Any, trainer: Any, history: Any) -> None:
            assert len(history) == 3  # one that is the best, two that are no better
            assert component.best_epoch_ == 1

        return check


class TestCheckpoint(CallbackKit):
    @pytest.fixture
    def component(self) -> Any:
        return plugins().component("callbacks", {"name": "checkpoint", "keep": 2})

    @pytest.fixture
    def effect(self) -> Any:
        def check(component: Any, trainer: Any, history: Any) -> None:
            found = sorted(p.name for p in (trainer.folder / "checkpoints").iterdir())
            # A training that is resumed from an older checkpoint sets newer ones of its run aside.
            left = [name for name in found if not name.startswith("superseded-")]
            assert left == ["best", "step-000000009", "step-000000012"]

        return check


class TestCsvLog(CallbackKit):
    @pytest.fixture
    def component(self) -> Any:
        return plugins().component("callbacks", "csv_log")

    @pytest.fixture
    def effect(self) -> Any:
        def check(component: Any, trainer: Any, history: Any) -> None:
            lines = (trainer.folder / "log.csv").read_text().splitlines()
            assert len(lines) == 1 + len(history)
            assert lines[0].split(",") == history.columns

        return check


class TestEpochLine(CallbackKit):
    @pytest.fixture
    def component(self) -> Any:
        return plugins().component("callbacks", "epoch_line")

    @pytest.fixture
    def effect(self, capsys: Any) -> Any:
        def check(component: Any, trainer: Any, history: Any) -> None:
            assert capsys.readouterr().out.splitlines()[-1].startswith("epoch 4: loss ")

        return check


class TestTensorboard(CallbackKit):
    @pytest.fixture
    def component(self) -> Any:
        pytest.importorskip("tensorboardX")
        return plugins().component("callbacks", {"name": "tensorboard", "steps": 2})

    @pytest.fixture
    def effect(self) -> Any:
        def check(component: Any, trainer: Any, history: Any) -> None:
            files = list((trainer.folder / "tensorboard").glob("events.*"))
            assert files
            assert all(f.stat().st_size > 100 for f in files)

        return check


class TestStopAfter(CallbackKit):
    watches = False

    @pytest.fixture
    def component(self) -> Any:
        pytest.importorskip("ortflex_example")
        return plugins().component("callbacks", {"name": "example_stop", "steps": 8})

    @pytest.fixture
    def effect(self) -> Any:
        def check(component: Any, trainer: Any, history: Any) -> None:
            assert len(history) == 3
            assert history["rows"][-1] == 8

        return check
