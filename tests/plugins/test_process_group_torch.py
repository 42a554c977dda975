"""The process group ``torch`` in processes: its kit, ``ortflex train``, and a run that was killed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ProcessGroupKit, Trainer
from ortflex_plugins.process_groups import Torch
from tests import children, models
from tests.training import plugins

pytest.importorskip("torch.distributed")
rng = np.random.default_rng(4)
X = rng.standard_normal((100, 6)).astype(np.float32)
Y = rng.standard_normal((100, 1)).astype(np.float32)


@pytest.mark.slow
class TestTorch(ProcessGroupKit):
    @pytest.fixture
    def component(self) -> Torch:
        return Torch(timeout=60.0)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "was not started by"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "but not MASTER_ADDR, MASTER_PORT"),
        (
            {"RANK": "a", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"},
            "RANK is 'a', expected a number",
        ),
    ],
)
def test_variables_of_a_launcher(environ: dict[str, str], reason: str) -> None:
    (found,) = Torch.unavailable(environ)
    assert reason in found


def recipe(folder: Path, **more: Any) -> Path:
    onnx.save(models.mlp(), folder / "model.onnx")
    np.savez(folder / "data.npz", X=X, y=Y)
    keys: dict[str, Any] = {"model": "model.onnx", "data": "data.npz", "loss": "squared_error"}
    keys |= {"optimizer": "adam", "batch_size": 8, "epochs": 3, "threads": 1, "validation": 0.2}
    keys |= more
    lines = [f"{name} = {json.dumps(value)}" for name, value in keys.items()]
    lines.append('backend = {name = "fused", steps_per_run = 1}')
    (folder / "train.toml").write_text("\n".join(lines))
    return folder / "train.toml"


def train(folder: Path, size: int, *arguments: str) -> Any:
    start = children.ranks("torch", size) if size > 1 else [sys.executable]
    call = [*start, "-m", "ortflex", "train", "train.toml", *arguments]
    return children.run(call, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})


def weights(path: Path) -> dict[str, bytes]:
    return {t.name: t.raw_data for t in onnx.load(path).graph.initializer}


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("shard_state=true",)])
def test_two_processes_train_to_the_bits_of_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    recipe(tmp_path, callbacks=["checkpoint"])
    one = train(tmp_path, 1, "accumulate=2", "output=one")
    assert one.returncode == 0, one.stderr
    two = train(tmp_path, 2, "distributed=auto", *options, "output=two")
    assert two.returncode == 0, two.stderr
    assert weights(tmp_path / "one" / "trained.onnx") == weights(tmp_path / "two" / "trained.onnx")
    names = [sorted(p.name for p in (tmp_path / run).iterdir()) for run in ("one", "two")]
    assert names[0] == names[1]
    histories = [tmp_path / run / "history.csv" for run in ("one", "two")]
    tables = [np.genfromtxt(path, names=True, delimiter=",") for path in histories]
    for column in tables[0].dtype.names:
        assert column == "seconds" or (tables[0][column] == tables[1][column]).all(), column
    assert two.stdout.count("wrote") == 1  # one process talks
    refused = train(tmp_path, 2, "distributed=auto", "output=two")
    assert refused.returncode != 0
    assert "contains a run that is finished" in refused.stderr
    assert "the process of rank 0 failed" in refused.stderr


SCRIPT = """
import os, sys
import numpy as np
from ortflex import Trainer, hook
from tests.plugins.test_process_group_torch import X, Y, trainer

class Dies:
    every_rank = True
    def __init__(self):
        self.rank = int(os.environ["RANK"])
    @hook
    def steps_end(self, progress):
        if self.rank == 1 and str(progress.step) == sys.argv[2]:
            os._exit(9)

folder = sys.argv[1]
more = {"shard_state": sys.argv[3] == "shard"}
saver = {"name": "checkpoint", "folder": folder, "steps": 2, "best": False}
if os.path.isdir(folder) and os.listdir(folder):
    made = Trainer.resume(folder, distributed="torch", callbacks=[saver], **more)
else:
    made = trainer(distributed="torch", callbacks=[saver, Dies()], **more)
made.fit(X, Y)
if made.rank == 0:
    np.savez(folder + "/weights.npz", **made.get_state())
"""


def trainer(**options: Any) -> Trainer:
    settings: dict[str, Any] = {"loss": "squared_error", "optimizer": "adam", "batch_size": 8}
    settings |= {"epochs": 4, "threads": 1, "progress": False}
    backend = {"name": "fused", "steps_per_run": 1}
    return Trainer(models.mlp(), backend=backend, plugins=plugins(), **settings | options)


SLEEPS = """
import os, time
from ortflex import hook
from tests.plugins.test_process_group_torch import X, Y, Torch, trainer

class Sleeps:
    every_rank = True
    @hook
    def epoch_end(self, progress):
        if os.environ["RANK"] == "1":
            time.sleep(20)

trainer(distributed=Torch(timeout=4), callbacks=[Sleeps()]).fit(X, Y)
"""


def run(folder: Path, script: str, *arguments: str, seconds: float = 60) -> Any:
    """A script in two processes."""
    (folder / "script.py").write_text(script)
    call = [*children.ranks("torch", 2), str(folder / "script.py"), *arguments]
    return children.run(call, env=children.with_tests(OMP_NUM_THREADS="1"), seconds=seconds)


@pytest.mark.slow
def test_a_process_that_sleeps_is_not_called_ended(tmp_path: Path) -> None:
    done = run(tmp_path, SLEEPS, seconds=300)
    assert done.returncode != 0
    assert "the process of rank 1 did not answer in time (" in done.stderr
    assert "no message within 4 s" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "state"), [(1, "whole"), (10, "whole"), (17, "whole"), (10, "shard")]
)
def test_a_killed_process_ends_the_rest_and_the_restart_gives_the_same_bits(
    tmp_path: Path, step: int, state: str
) -> None:
    folder = str(tmp_path / "kept")
    killed = run(tmp_path, SCRIPT, folder, str(step), state)
    assert killed.returncode != 0
    assert "RankFailed" in killed.stderr
    again = run(tmp_path, SCRIPT, folder, "never", state)
    assert again.returncode == 0, again.stderr
    whole = trainer(accumulate=2)
    whole.fit(X, Y)
    with np.load(tmp_path / "kept" / "weights.npz") as got:
        for name, array in whole.get_state().items():
            assert got[name].tobytes() == array.tobytes(), name
