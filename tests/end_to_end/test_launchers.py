"""The scripts of docs/examples/distributed give the weights of one process under every launcher."""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex import Trainer
from tests import models

pytestmark = [pytest.mark.once, pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "examples" / "distributed"
FILES = ["model.onnx", "data.npz", "trained.onnx"]
RUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((101, 6)).astype(np.float32)
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", X=x, y=np.sin(x).sum(axis=1, keepdims=True))
    return tmp_path


def environment() -> dict[str, str]:
    # Of another launcher, in which the tests themselves may run.
    own = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return own | {
        "PATH": path,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def start(folder: Path, command: Sequence[str | Path]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(each) for each in command],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[str]) -> str:
    outputs = []
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return "\n".join(outputs)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def check_weights(folder: Path) -> None:
    """What two processes wrote is what one process computes with accumulate=2."""
    arrays = np.load(folder / "data.npz")
    alone = Trainer(
        folder / "model.onnx",
        loss="squared_error",
        optimizer="adam",
        epochs=3,
        accumulate=2,
        backend={"name": "fused", "steps_per_run": 1},
        progress=False,
    )
    alone.fit(arrays["X"], arrays["y"], validation_data=0.2)
    trained = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(folder / "trained.onnx").graph.initializer
    }
    for name, array in alone.get_state().items():
        np.testing.assert_array_equal(trained[name], array)


@pytest.mark.slow
def test_torchrun_on_one_machine(folder: Path) -> None:
    pytest.importorskip("torch.distributed")
    command = [*RUN, "--standalone", "--nproc-per-node", "2", SCRIPTS / "torchrun_train.py", *FILES]
    finish(start(folder, command))
    check_weights(folder)


def test_torchrun_on_two_machines(folder: Path) -> None:
    """Two machines are two calls of torchrun, which here meet on this one."""
    pytest.importorskip("torch.distributed")
    place = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    script = ["--nproc-per-node", "1", SCRIPTS / "torchrun_train.py", *FILES]
    machines = [
        start(folder, [*RUN, "--nnodes", "2", "--node-rank", str(rank), *place, *script])
        for rank in range(2)
    ]
    finish(*machines)
    check_weights(folder)


@pytest.mark.slow
def test_the_script_of_slurm(folder: Path) -> None:
    """With an srun that starts its command twice, and one process instead of four on each machine."""
    pytest.importorskip("torch.distributed")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    tools = {
        "scontrol": "echo 127.0.0.1; echo elsewhere",
        "srun": '"$@" & first=$!; "$@" & second=$!; wait $first && wait $second',
        "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    }
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    script = (SCRIPTS / "train.sbatch").read_text("utf-8")
    for old, new in (
        ("--nproc-per-node 4", "--nproc-per-node 1"),
        ("29500", str(free_port())),
        ("torchrun_train.py", str(SCRIPTS / "torchrun_train.py")),
    ):
        assert old in script
        script = script.replace(old, new)
    (folder / "job").write_text(script)
    slurm = "SLURM_NNODES=2 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=both SLURM_CPUS_PER_TASK=4"
    finish(start(folder, ["bash", "-c", f'PATH="$PWD:$PATH" {slurm} bash job']))
    check_weights(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "module"),
    [("ray_train.py", "ray.train"), ("spark_train.py", "pyspark.ml.torch.distributor")],
)
def test_a_script_of_its_own_launcher(script: str, module: str, folder: Path) -> None:
    pytest.importorskip(module)
    pytest.importorskip("torch.distributed")
    if "spark" in script and shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    finish(start(folder, [sys.executable, SCRIPTS / script, *FILES]))
    check_weights(folder)


def test_a_search_with_dask(folder: Path) -> None:
    pytest.importorskip("dask.distributed")
    pytest.importorskip("sklearn")
    printed = finish(start(folder, [sys.executable, SCRIPTS / "dask_search.py"]))
    search = runpy.run_path(str(SCRIPTS / "dask_search.py"))["search"]
    with pytest.warns(UserWarning, match="not converged"):
        alone = search()
    assert f"{alone.best_params_} {alone.best_score_}" in printed
