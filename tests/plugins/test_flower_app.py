"""The project of ``ortflex new-flower-app`` under ``flwr run``, and the app of the documentation."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex import Trainer
from ortflex_core import Recipe
from tests.plugins.commands import prepare, works

pytest.importorskip("flwr")
pytest.importorskip("ray")

from ortflex_plugins.flower import partition_rows, recipe_data
from tests.plugins.test_flower import averaged, run, weights
from tests.training import same

ROOT = Path(__file__).parents[2]
RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
optimizer = "adam"
validation = 0.2
metrics = ["mae"]
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def superlink(home: Path) -> Iterator[dict[str, str]]:
    """Flower's server of simulations, ended afterwards; the environment for ``flwr``."""
    port, control = free_port(), free_port()
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    folder = Path(sys.executable).parent
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }
    command = [str(folder / "flower-superlink"), "--insecure", "--simulation"]
    command += ["--isolation", "subprocess", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--control-api-address", f"127.0.0.1:{control}"]
    with (home / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(600):
            with socket.socket() as one:
                if not one.connect_ex(("127.0.0.1", port)):
                    break
            assert process.poll() is None, (home / "log.txt").read_text()
            time.sleep(0.1)
        yield environment
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def expected(folder: Path) -> dict[str, np.ndarray]:
    """Two clients and two rounds with Trainers alone; a sum of two has one order."""
    recipe = Recipe.load(folder / "train.toml", ["epochs=1", "progress=false"])
    trainers, parts = [Trainer.from_recipe(recipe) for _ in range(2)], []
    for k in range(2):

        class Place:
            node_config = {"partition-id": k, "num-partitions": 2}  # noqa: RUF012

        parts.append(partition_rows(recipe_data(recipe)[0], Place()))
    rows = [len(next(iter(p.inputs.values()))) for p in parts]
    # A fifth is held out.
    rows = [n - round(0.2 * n) for n in rows]
    start = trainers[0].get_state()
    return averaged(trainers, [(part,) for part in parts], rows, 2, start, validation_data=0.2)


@pytest.mark.timeout(280)
def test_flwr_run_takes_the_project_and_trains_what_trainers_would(tmp_path: Path) -> None:
    prepare(tmp_path, RECIPE)
    recipe, folder = tmp_path / "train.toml", tmp_path / "two-homes"
    works("new-flower-app", str(recipe), "-o", str(folder))
    with superlink(tmp_path / "home") as environment:
        call = [str(Path(sys.executable).parent / "flwr"), "run", str(tmp_path / "two-homes")]
        call += ["--federation-config", "num-supernodes=2", "--run-config", "num-server-rounds=2"]
        done = subprocess.run(
            [*call, "--stream"], env=environment, cwd=tmp_path, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    trained = tmp_path / "two-homes" / "trained.onnx"
    assert trained.exists(), done.stdout + done.stderr
    assert "'mae'" in done.stdout
    same(weights(trained), expected(tmp_path), 0)


def test_the_app_of_the_docs_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, RECIPE)
    data = np.load("data.npz")
    names: dict[str, Any] = {"X": data["X"], "y": data["y"]}
    page = (ROOT / "docs" / "howto" / "train-with-flower.md").read_text("utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    exec(compile(code, "train-with-flower.md", "exec"), names)
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10
    run(names["client"], names["server"])

    def loss(path: str) -> float:
        return Trainer(path, loss="squared_error").evaluate(data["X"], data["y"])["loss"]

    assert loss("trained.onnx") < loss("model.onnx")
    assert onnx.load("trained.onnx").graph.node == onnx.load("model.onnx").graph.node
