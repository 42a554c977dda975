"""The benchmark runs and writes down what it measured; no time is asserted."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the script sets it
    spec = importlib.util.spec_from_file_location("bench", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench", module)
    spec.loader.exec_module(module)
    return module


def test_every_row_has_the_versions_and_runs_add_up(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "new" / "bench.csv"
    arguments = ["--rounds", "1", "--epochs", "1", "--case", "sgd, batch 15"]
    for _ in range(2):
        bench.main([*arguments, "--results", str(path)])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    names = [row["who"] for row in rows]
    assert "scikit-learn" in names
    assert len(names) == 2 * len(set(names))
    assert all(row["runtime"] and row["numpy"] and float(row["us_a_step"]) > 0 for row in rows)
    assert "µs a step" in capsys.readouterr().out
