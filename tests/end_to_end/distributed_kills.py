"""Trainings in several processes of which one is killed at a drawn moment, and that are started again.

``python -m tests.end_to_end.distributed_kills --runs 50 --groups torch mpi`` prints what was wrong and the
counts. The others have to end within 30 s and with an error; the restart with the newest checkpoint has to
end with the bits of a training that nobody disturbed, weights, optimizer state and History.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ortflex_core import Trainer, hook, internals_of, list_checkpoints
from tests import children, models
from tests.training import plugins

LIMIT = 30.0
"""Seconds that the others may take to end."""
WHOLE = 120.0
"""Seconds that a training may take."""
ROWS = 403


class Started:
    """Notes where a process is, so that it can be killed, and when it has begun to train."""

    every_rank = True

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"process-{rank}"

    @hook
    def train_start(self) -> None:
        self.path.with_suffix(".new").write_text(str(os.getpid()))
        self.path.with_suffix(".new").rename(self.path)


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """The options of a training, as JSON."""

    def one(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    options: dict[str, Any] = {
        "optimizer": one("adam", "momentum", "prodigy"),
        "epochs": 6,
        "batch_size": one(4, 8),
        "seed": int(rng.integers(100)),
        "schedule": one("constant", {"name": "cosine", "by": "step"}),
    }
    if rng.random() < 0.3:
        options["sync_every"] = one(3, 7)
    if rng.random() < 0.3:
        options["averaging"] = "ema"
    return {"options": options, "steps": one(3, 10), "per_rank": one(1, 2)}


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((ROWS, 6)).astype(np.float32)
    return x, np.tanh(x[:, :1]) + 0.1 * rng.standard_normal((ROWS, 1)).astype(np.float32)


def train(case: dict[str, Any], distributed: Any, folder: Path | None) -> dict[str, Any]:
    """Train, or go on with the newest checkpoint; what it leaves."""
    callbacks: list[Any] = []
    own: dict[str, Any] = {"distributed": distributed, "accumulate": case["per_rank"]}
    trainer = None
    if folder is not None:
        kept = folder / "kept"
        saver = {"name": "checkpoint", "folder": str(kept), "steps": case["steps"], "best": False}
        callbacks = [saver, Started(folder, children.rank())]
        if list_checkpoints(kept):
            changes = {"distributed": distributed, "callbacks": callbacks, "progress": False}
            trainer = Trainer.resume(kept, plugins=plugins(), **changes)
    if trainer is None:
        options = {"loss": "squared_error", "threads": 1, "progress": False, "plugins": plugins()}
        options["backend"] = {"name": "fused", "steps_per_run": 1}
        trainer = Trainer(models.mlp(), callbacks=callbacks, **options, **own, **case["options"])
    history = trainer.fit(*data())
    state = (
        trainer.get_state() | trainer.get_state(averaged=True) | internals_of(trainer).live.slots()
    )
    columns = {c: list(history[c]) for c in history.columns if c != "seconds"}
    return {"state": {n: a.tobytes().hex() for n, a in state.items()}, "history": repr(columns)}


def work(folder: Path, group: str) -> None:
    case = json.loads((folder / "case.json").read_text("utf-8"))
    spec: Any = {"name": "torch", "timeout": 60.0} if group == "torch" else group
    out = train(case, spec, folder)
    (folder / f"result-{children.rank()}.json").write_text(json.dumps(out), "utf-8")


def start(folder: Path, group: str, size: int) -> subprocess.Popen[bytes]:
    call = [*children.ranks(group, size), "-m", "tests.end_to_end.distributed_kills"]
    call += ["--work", str(folder), group]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            call, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def kill_one(
    folder: Path, process: subprocess.Popen[bytes], size: int, rng: np.random.Generator, last: float
) -> tuple[str, float]:
    """Kill a rank while it trains; what was wrong, and how long the others took to end."""
    paths = [folder / f"process-{k}" for k in range(size)]
    end = time.monotonic() + WHOLE
    while not all(p.exists() for p in paths):
        if time.monotonic() > end or process.poll() is not None:
            return "it did not begin to train", 0.0
        time.sleep(0.005)
    time.sleep(float(rng.uniform(0, last)))
    rank = int(rng.integers(size))
    try:
        os.kill(int(paths[rank].read_text()), signal.SIGKILL)
    except ProcessLookupError:
        return "too late", 0.0
    killed = time.monotonic()
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"the others still ran {LIMIT} s after rank {rank} was killed", LIMIT
    seconds = time.monotonic() - killed
    return ("" if code else f"exit code 0 although rank {rank} was killed"), seconds


def run(number: int, group: str, seed: int, last: float) -> tuple[str, float]:
    """One training: killed, started again, compared; what was wrong and how long the others took."""
    rng = np.random.default_rng([seed, number, group == "mpi"])
    case, size = draw(rng), int(rng.integers(2, 4))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(case), "utf-8")
        problem, seconds = kill_one(folder, start(folder, group, size), size, rng, last)
        if problem and problem != "too late":
            return f"{problem}: {case}\n{(folder / 'log').read_text()[-3000:]}", seconds
        kept = len(list_checkpoints(folder / "kept"))
        again = start(folder, group, size)
        try:
            code = again.wait(WHOLE)
        except subprocess.TimeoutExpired:
            os.killpg(again.pid, signal.SIGKILL)
            return f"the restart did not end: {case}", seconds
        if code:
            log = (folder / "log").read_text()[-3000:]
            return f"the restart failed with {kept} checkpoints: {case}\n{log}", seconds
        results = [
            json.loads((folder / f"result-{k}.json").read_text("utf-8")) for k in range(size)
        ]
    return verdict(case, size, results, problem), seconds


def verdict(case: dict[str, Any], size: int, results: list[Any], problem: str) -> str:
    """What differs from a training that nobody disturbed."""
    if "sync_every" in case["options"]:
        from ortflex_core import run_ranks

        whole = run_ranks(size, lambda group: train(case, group, None))[0]
    else:
        whole = train({**case, "per_rank": size * case["per_rank"]}, None, None)
    if any(result != whole for result in results):
        return f"other bits than undisturbed: {case}"
    return problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="of all groups together")
    parser.add_argument("--groups", nargs="+", default=["torch", "mpi"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=1.0, help="seconds in which the kill comes")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(Path(given.work[0]), given.work[1])
        return
    wrong, late, times = 0, 0, []
    for number in range(given.runs):
        group = given.groups[number % len(given.groups)]
        problem, seconds = run(number, group, given.seed, given.within)
        if problem == "too late":
            late += 1
        elif problem:
            wrong += 1
            print(f"run {number}, {group}: {problem}", flush=True)
        else:
            times.append(seconds)
    longest = max(times, default=0.0)
    print(
        f"{given.runs} runs, {len(times)} killed and restarted to the same bits, {late} that had ended "
        f"before, {wrong} wrong; the others ended {longest:.1f} s after a kill at most"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
