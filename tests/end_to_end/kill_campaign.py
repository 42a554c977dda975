"""Trainings of drawn recipes that are killed at drawn moments, again and again, until one comes to its end.

``python -m tests.end_to_end.kill_campaign --seed 0 --kills 1000`` prints what was wrong and the counts.
Every training runs in a fork of this process, which has imported all it needs and has no session. Half
of the kills are before a drawn call to the file system, the others at a drawn time. What the last one ends
with has to be what an undisturbed training of the same recipe ends with, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import safetensors.numpy

from ortflex_core import Trainer, internals_of, list_checkpoints, require_runtime
from ortflex_plugins.cli import run_folder, train
from ortflex_plugins.cli.main import main as ortflex
from ortflex_plugins.pictures import measure
from tests import children, models
from tests.training import plugins

WARM = (run_folder, train, measure, safetensors.numpy)
"""What forks would import, each for itself."""
ROWS, FEATURES = 60, 6
LIMIT = 120.0
"""Seconds that a training may take, which needs one."""
OPTIMIZERS = (
    *("sgd", "momentum", "nesterov", "adam", "adamw", "lamb", "adagrad"),
    *("rmsprop", "adadelta", "adamax", "nadam", "radam", "lion", "lars", "adafactor", "prodigy"),
)
SCHEDULES: tuple[Any, ...] = (
    "constant",
    "invscaling",
    {"name": "exponential", "by": "step"},
    {"name": "cosine", "by": "epoch"},
    {
        "name": "one_cycle",
        "by": "epoch",
        "up": 0.4,
    },  # a function does not say how many steps it has
    {"name": "plateau", "patience": 1},
    {"name": "warmup", "by": "step", "length": 7},
)
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate")


def network() -> onnx.ModelProto:
    """Two products with BatchNormalization and Dropout between them."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((FEATURES, 8)) / 2,
        "b1": np.zeros(8),
        "scale": np.ones(8),
        "shift": np.zeros(8),
        "mean": np.zeros(8),
        "var": np.ones(8),
        "w2": rng.standard_normal((8, 1)) / 2,
        "b2": np.zeros(1),
        "ratio": np.array(0.25),
    }
    body = "h = Gemm(X, w1, b1) n = BatchNormalization(h, scale, shift, mean, var) t = Tanh(n) "
    body += "d = Dropout(t, ratio) Y = Gemm(d, w2, b2)"
    return models.parsed(body, weights, f"float[N, {FEATURES}] X", "float[N, 1] Y")


def arrays() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
    return x, np.tanh(x[:, :1]) + 0.2 * rng.standard_normal((ROWS, 1)).astype(np.float32)


def backends() -> list[str]:
    """Those that can train these networks here, bit for bit."""
    names = ("fused", "training_agent")
    return [n for n in names if not plugins()["backends"].load(n).available(require_runtime())]


def draw(rng: np.random.Generator) -> dict[str, Any]:
    def one(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    backend = one(*backends())
    out: dict[str, Any] = {
        "backend": {"name": "fused", "steps_per_run": one(1, 3)} if backend == "fused" else backend,
        "optimizer": one(*OPTIMIZERS),
        "schedule": one(*SCHEDULES),
        "batch_size": one(6, 7, 16),
        "epochs": one(3, 5),
        "seed": int(rng.integers(100)),
        "shuffle": bool(rng.integers(2)),
        "threads": 1,
    }
    if rng.random() < 0.4:
        out["averaging"] = one("ema", {"name": "swa", "start": 1})
    if rng.random() < 0.3:
        out["accumulate"] = 2
    if rng.random() < 0.3:
        out["groups"] = [one({"params": "*2", "rate": 0.5}, {"params": "*2", "start_epoch": 1})]
    if rng.random() < 0.3:
        out["penalty"] = {"name": "l2", "l2": 0.01}
    if rng.random() < 0.3:
        out["clip_norm"] = 0.5
    checkpoint: dict[str, Any] = {
        "name": "checkpoint",
        "keep": one(1, 2, 9),
        "best": one(True, False),
    }
    checkpoint[one("steps", "epochs")] = one(1, 2)
    callbacks: list[Any] = [checkpoint]
    if rng.random() < 0.4:
        callbacks.append({"name": "early_stopping", "patience": 1, "min_delta": 0.02})
    if rng.random() < 0.3:
        callbacks.append("csv_log")
    out["callbacks"] = callbacks
    networks = ["plain"]
    if backend == "fused":
        networks += ["whole", "whole"]
    return {
        "options": out,
        "network": one(*networks),
        "by": one("api", "command line"),
        "data": one("arrays", "weights", "function", "pieces"),
        "validation": bool(rng.integers(2)),
    }


# ---------------------------------------------------------------------- in the fork


def run(case: dict[str, Any], folder: Path) -> None:
    """Start the training in a folder, or continue it, and write what came out."""
    (by_api if case["by"] == "api" else by_command_line)(case, folder)
    (folder / "done").touch()


def by_api(case: dict[str, Any], folder: Path) -> None:
    place = folder / "checkpoints"
    if list_checkpoints(place):
        trainer = Trainer.resume(place, plugins=plugins(), progress=False)
        trainer.folder = folder
    else:
        if (place / "best").exists():  # of a process that wrote nothing else
            shutil.move(place, folder / f"before-{time.monotonic_ns()}")
        proto = models.mlp() if case["network"] == "plain" else network()
        options = {"loss": "squared_error", "progress": False, "plugins": plugins()}
        trainer = Trainer(proto, **options | case["options"])
        trainer.folder = folder
    x, y = arrays()
    held = (x[:20], y[:20]) if case["validation"] else None
    if case["data"] == "function":

        def batches(epoch: int, start: int) -> Iterator[Any]:
            rng = np.random.default_rng(epoch)
            order = rng.permutation(ROWS)
            for k in range(start, 8):
                rows = order[7 * k : 7 * k + 7]
                yield x[rows], y[rows]

        history = trainer.fit(batches, validation_data=held)
    elif case["data"] == "weights":
        weight = np.linspace(0.5, 1.5, ROWS).astype(np.float32)
        history = trainer.fit(x, y, weight, validation_data=held)
    else:
        history = trainer.fit(x, y, validation_data=held)
    result = {
        "state": {n: a.tobytes() for n, a in trainer.get_state(buffers=True).items()},
        "averaged": {n: a.tobytes() for n, a in trainer.get_state(averaged=True).items()},
        "slots": {n: a.tobytes() for n, a in internals_of(trainer).live.slots().items()},
        "history": [{k: v for k, v in row.items() if k != "seconds"} for row in history],
    }
    (folder / "result.pickle").write_bytes(pickle.dumps(result))


def by_command_line(case: dict[str, Any], folder: Path) -> None:
    from ortflex_core import to_toml

    os.chdir(folder)
    if not Path("train.toml").exists():
        x, y = arrays()
        if case["data"] == "pieces":
            Path("rows").mkdir(exist_ok=True)
            np.save("rows/X.npy", x)
            np.save("rows/y.npy", y)
        else:
            np.savez("data.npz", X=x, y=y)
        onnx.save(models.mlp() if case["network"] == "plain" else network(), "model.onnx")
        recipe: dict[str, Any] = {"model": "model.onnx", "loss": "squared_error", "output": "run"}
        recipe["data"] = "rows" if case["data"] == "pieces" else "data.npz"
        recipe |= case["options"] | {"progress": False}
        if case["validation"] and case["data"] != "pieces":
            recipe["validation"] = 0.25
        Path("written.toml").write_text("\n".join(f"{k} = {to_toml(v)}" for k, v in recipe.items()))
        os.rename("written.toml", "train.toml")
    more: list[str] = []
    if list_checkpoints(Path("run/checkpoints")):
        more = ["--resume", "run"]
    elif Path("run").exists():
        more = ["--force"]
    try:
        ortflex(["train", "train.toml", *more], standalone_mode=False)
    except SystemExit as error:
        if error.code:
            raise RuntimeError(f"ortflex train ended with {error.code}") from error


def result(case: dict[str, Any], folder: Path) -> Any:
    """What a training came to; all of it has to be the same."""
    if case["by"] == "api":
        return pickle.loads((folder / "result.pickle").read_bytes())
    lines = (folder / "run" / "history.csv").read_text().splitlines()
    seconds = lines[0].split(",").index("seconds")
    rows = [[c for k, c in enumerate(line.split(",")) if k != seconds] for line in lines]
    return {"trained": (folder / "run" / "trained.onnx").read_bytes(), "history": rows}


# ---------------------------------------------------------------------- the campaign


def fork(
    case: dict[str, Any], folder: Path, event: int = 0, seconds: float = 0.0
) -> tuple[int, int]:
    """Run in a fork, which is killed before its n-th event or after a time: signal or exit code, events."""
    folder.mkdir(exist_ok=True)
    counts = folder / "events"
    child = os.fork()
    if child == 0:
        code = 1
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        seen = [0]

        def audit(name: str, _: Any) -> None:
            if name in EVENTS:
                seen[0] += 1
                if seen[0] == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # whose signal ends the process at once
        try:
            run(case, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
            counts.write_text(str(seen[0]))
        os._exit(code)
    status = children.wait(child, LIMIT, f"{folder}, event {event}, {seconds} s: {case}")
    return status, int(counts.read_text()) if counts.exists() else 0


def chain(
    case: dict[str, Any], rng: np.random.Generator, place: Path, most: int
) -> tuple[int, str]:
    """Kill one training until it comes to its end; how often, and what was wrong."""
    start = time.monotonic()
    status, events = fork(case, place / "whole")
    taken = time.monotonic() - start
    text = (place / "whole" / "log").read_text()
    if status:
        if "Unsupported" in text:
            return 0, "refused: " + text.strip().splitlines()[-1]
        return 0, f"the undisturbed training: {text[-2000:]}"
    kills = 0
    while True:
        moment: dict[str, Any] = {}
        if kills < most:
            if rng.random() < 0.5:
                moment = {"event": int(rng.integers(1, events + 1))}
            else:
                moment = {"seconds": float(rng.uniform(0.02, 1.0)) * taken}
        status, _ = fork(case, place / "cut", **moment)
        if status not in (-signal.SIGKILL, -signal.SIGALRM):
            break
        kills += 1
    if status:
        return kills, f"after {kills} kills: {(place / 'cut' / 'log').read_text()[-3000:]}"
    if result(case, place / "whole") != result(case, place / "cut"):
        return kills, f"after {kills} kills: another result"
    return kills, ""


def campaign(seed: int, kills: int) -> dict[str, Any]:
    """So many kills over drawn recipes."""
    for kind in ("losses", "optimizers", "schedules", "averages", "callbacks", "penalties", "data"):
        for name in plugins()[kind].names():
            with contextlib.suppress(ImportError, LookupError):
                plugins()[kind].load(name)
    backends()
    counts: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    number = 0
    while counts["kills"] < kills and number < 20 * kills:
        rng = np.random.default_rng([seed, number])
        case = draw(rng)
        with tempfile.TemporaryDirectory(prefix="ortflex-kill-") as place:
            done, text = chain(case, rng, Path(place), 6)
        counts["kills"] += done
        counts["chains"] += 1
        counts[f"kills by {case['by']}"] += done
        if text.startswith("refused"):
            counts["refused"] += 1
        elif text:
            wrong.append({"number": number, "case": case, "text": text})
        number += 1
    return {"seed": seed, "counts": dict(counts), "wrong": wrong}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=1000)
    given = parser.parse_args()
    found = campaign(given.seed, given.kills)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["wrong"]))
