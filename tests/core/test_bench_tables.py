"""The tables of the benchmarks: a small one runs, and peers that cannot run have their reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import gpu

pytestmark = pytest.mark.once


def test_gpu_table_runs_on_a_processor_and_gives_reasons() -> None:
    root = Path(__file__).parents[2]
    words = ["--device", "cpu", "--workload", "W5", "--steps", "2", "--rounds", "1"]
    words += ["--seconds", "0.01", "--peer", "ortflex", "--peer", "ortflex recorded"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "gpu", *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    lines = done.stdout.splitlines()
    (row,) = (line for line in lines if line.startswith("| W5"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert float(cells[1]) > 0
    assert cells[2] == "–"
    assert "- W5, ours, CUDA graphs: needs a CUDA device" in lines


@pytest.mark.parametrize(
    ("times", "reached"),
    [
        ({"ortflex": 40.0, "ortflex recorded": 29.0, "torch": 150.0}, True),
        ({"ortflex": 31.0, "torch": 900.0}, False),
        ({"ortflex": 29.0, "torch": 140.0}, False),
    ],
)
def test_gpu_goals_are_about_our_fastest_and_torch(times: dict[str, float], reached: bool) -> None:
    line = gpu.line("W1", ["ortflex", "ortflex recorded", "torch"], times, True)
    assert ("reached" in line) is reached
    assert ("missed" in line) is not reached
