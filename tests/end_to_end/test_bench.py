"""The benchmarks run and write down what they measured, and work grows with nodes and rows, no faster."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer
from tests import children, models
from tests.benchmarks import gpu, growth, layers, peers_table
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data, weights

pytestmark = pytest.mark.once


@pytest.mark.slow
def test_peers_do_the_same_work_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row has the versions, and runs add up in one file."""
    pytest.importorskip("sklearn")
    path = tmp_path / "new" / "peers.csv"
    arguments = ["--workload", "W1", "--peer", "scikit-learn", "--rounds", "1", "--seconds", "0"]
    arguments += ["--python", f"ortflex={sys.executable}", "--results", str(path)]
    for _ in range(2):
        peers_table.main(arguments)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["who"] for row in rows] == 2 * ["ortflex", "scikit-learn"]
    assert all(row["version"] and row["runtime"] and row["numpy"] for row in rows)
    assert all(float(row["us_a_step"]) > 0 for row in rows)
    assert "target" in capsys.readouterr().out


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_whole(name: str) -> None:
    workload = WORKLOADS[name]
    x, y, weight = data(workload)
    assert len(x) == len(y) == workload.rows == workload.steps * workload.batch
    assert weight is None or weight.shape == (workload.rows,)
    assert len(network(workload).graph.initializer) >= len(weights(workload))


def test_torch_has_the_same_network() -> None:
    torch = pytest.importorskip("torch")
    from tests.benchmarks.torch_network import forward

    for workload in WORKLOADS.values():
        x = data(workload)[0][:3]
        parameters = [torch.from_numpy(p) for p in weights(workload)]
        expected = forward(workload, torch.from_numpy(x), parameters).numpy()
        (got,) = models.predict(network(workload), {"X": x}).values()
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_layers_are_compared_before_they_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    layers.main(["--case", "mlp, 15 rows", "--rounds", "1"])
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[1:]] == layers.engines()
    theirs, ours = layers.passes(WORKLOADS["W1"], "fused")
    y, gradients = theirs()
    layers.check((y, gradients), ours())
    with pytest.raises(AssertionError, match="not close"):
        layers.check((y, [*gradients[:-1], gradients[-1] + 1]), ours())


def test_gpu_table_runs_on_a_processor_and_gives_reasons() -> None:
    words = ["--device", "cpu", "--workload", "W5", "--steps", "2", "--rounds", "1"]
    words += ["--seconds", "0.01", "--peer", "ortflex", "--peer", "ortflex recorded"]
    call = [sys.executable, "-m", "tests.benchmarks", "gpu", *words]
    done = children.run(call, check=True, env=children.with_tests())
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


# Growth: calls are counted, nothing is timed ------------------------------------------------------


def calls(function: Callable[[], Any]) -> int:
    """How many functions of Python are called."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def built(nodes: int, weights: bool) -> int:
    model = growth.chain(nodes, weights)
    x, y = np.zeros((15, 4), np.float32), np.zeros((15, 4 if weights else 3), np.float32)
    return calls(lambda: growth.trained(model, x, y, 15))


@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_building_grows_linearly_with_the_nodes(weights: bool) -> None:
    built(2, weights)  # imports
    few, more, many = (built(n, weights) for n in (200, 400, 1400))
    assert (many - more) / (more - few) < 5 * 1.1


@pytest.mark.slow
def test_ten_thousand_nodes_can_be_trained() -> None:
    assert growth.fresh("weighted-nodes", "10000")["seconds"] > 0


def test_a_step_costs_the_same_with_any_number_of_rows() -> None:
    def an_epoch(rows: int) -> int:
        x = np.zeros((rows, 4), np.float32)
        y = np.zeros((rows, 3), np.float32)
        trainer: Trainer = growth.trained(growth.chain(1), x, y, 10)
        return calls(lambda: trainer.fit(x, y))

    few, some, many = an_epoch(1_000), an_epoch(10_000), an_epoch(100_000)
    assert (many - few) / (some - few) < 12


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no module resource")
def test_memory_in_addition_to_the_data_does_not_grow() -> None:
    few, many = growth.fresh("rows", "1000"), growth.fresh("rows", "1000000")
    # The order of the rows has 8 bytes a row, and it is made again while the last one is there.
    assert many["mib"] - few["mib"] < 32 + many["data_mib"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no module resource")
def test_the_peak_of_a_large_network_with_adam() -> None:
    assert growth.fresh("large")["mib"] < 260
