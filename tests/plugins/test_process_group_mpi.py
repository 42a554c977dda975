"""The process group ``mpi`` in processes that mpiexec starts: its kit, and ``ortflex train``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ortflex_core import ProcessGroupKit
from ortflex_plugins.process_groups import Mpi
from tests import children
from tests.plugins.test_process_group_torch import recipe, weights

MPIEXEC = shutil.which(
    "mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
)
started = pytest.mark.skipif(
    MPIEXEC is None, reason="there is no mpiexec: pip install 'ortflex[mpi]'"
)


class TestMpi(ProcessGroupKit):
    @pytest.fixture
    def component(self) -> Mpi:
        return Mpi()

    @pytest.fixture
    def environ(self) -> dict[str, str]:
        return {"PMI_RANK": "0", "PMI_SIZE": "2"}

    @pytest.fixture
    def launcher(self) -> Callable[[int], Sequence[str]]:
        if MPIEXEC is None:
            pytest.skip("there is no mpiexec: pip install 'ortflex[mpi]'")
        return lambda size: children.ranks("mpi", size)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "was not started by mpiexec"),
        ({"SLURM_NTASKS": "4"}, "was not started by mpiexec"),
        ({"PMI_RANK": "0"}, "set PMI_RANK, but not PMI_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "set OMPI_COMM_WORLD_SIZE, but not OMPI_COMM_WORLD_RANK"),
    ],
)
def test_variables_of_a_launcher(environ: dict[str, str], reason: str) -> None:
    pytest.importorskip("mpi4py")
    (found,) = Mpi.unavailable(environ)
    assert reason in found


@started
def test_the_command_trains_in_three_processes_to_the_bits_of_one(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    recipe(tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    one = [sys.executable, "-m", "ortflex", "train", "train.toml"]
    three = [*children.ranks("mpi", 3), *one[1:]]
    children.run([*one, "accumulate=3", "output=one"], cwd=tmp_path, env=env, check=True)
    given = {"cwd": tmp_path, "env": env, "check": True}
    done = children.run([*three, "distributed=auto", "output=three"], **given)
    ends = [weights(tmp_path / run / "trained.onnx") for run in ("one", "three")]
    assert ends[0] == ends[1]
    assert done.stdout.count("wrote") == 1
    refused = children.run([*three, "distributed=mpi", "output=three"], cwd=tmp_path, env=env)
    assert refused.returncode != 0
    assert "the process of rank 0 failed" in refused.stderr


STALLED = """
import os, sys, time
import numpy as np
from ortflex import Trainer
from ortflex_core import Callback, hook
from ortflex_plugins.process_groups import Mpi

class Stops(Callback):
    every_rank = True

    @hook
    def epoch_end(self):
        if os.environ["PMI_RANK"] == "1":
            time.sleep(120)

rows = np.ones((8, 6), np.float32)
trainer = Trainer("model.onnx", loss="squared_error", batch_size=4, epochs=3, backend="fused",
                  progress=False, distributed=Mpi(timeout=3.0), callbacks=[Stops()])
try:
    trainer.fit(rows, rows[:, :1])
except Exception as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(5)
"""


@started
def test_a_process_that_stops_answering_ends_all_with_an_error(tmp_path: Path) -> None:
    """The class: one process hangs, and the others wait for it without an end; MPI's own end waits, too."""
    pytest.importorskip("mpi4py")
    recipe(tmp_path)
    (tmp_path / "stalled.py").write_text(STALLED)
    done = children.run([*children.ranks("mpi", 2), "stalled.py"], cwd=tmp_path, seconds=60)
    assert done.returncode != 0
    assert "RankFailed" in done.stdout
    assert "no message within 3 s" in done.stdout
