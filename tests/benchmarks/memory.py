"""The peak of a step, measured in fresh processes and estimated, with and without recompute=True.

Times are measured in turns in one process, with one thread. Memory is in addition to what the process had
after its imports.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads a BLAS

import argparse
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import children

_MIB = 2**20
NAMES = ("W4", "W7", "W8", "resnet", "gpt2")


def arguments_of(name: str) -> dict[str, Any]:
    """The arguments of the Trainer, except the batch size."""
    from tests.benchmarks.workloads import WORKLOADS

    if name in WORKLOADS:
        loss, optimizer = WORKLOADS[name].loss, WORKLOADS[name].optimizer
        return {"loss": loss, "optimizer": optimizer}
    axis = 1 if name == "resnet" else -1
    return {"loss": {"name": "softmax_cross_entropy", "axis": axis}, "optimizer": "sgd"}


def write(name: str, rows: int, folder: Path, **size: int) -> Path:
    """The file of a network, and next to it a batch of this many rows (0: the usual number)."""
    import numpy as np
    import onnx

    from tests.benchmarks.workloads import WORKLOADS

    if name in WORKLOADS:
        from tests.benchmarks.onnx_network import network
        from tests.benchmarks.workloads import data

        workload = WORKLOADS[name]
        path = folder / f"{name}.onnx"
        onnx.save(network(workload), path)
        x, y, _ = data(workload)
        rows = rows or workload.batch
    else:
        from tests.benchmarks.large_networks import made

        path, x, y = made(name, folder, **({"places": 128, **size} if name == "gpt2" else {}))
    count = rows or len(x)
    again = -(-count // len(x))
    x, y = (np.concatenate([a] * again)[:count] for a in (x, y))
    np.savez(path.with_suffix(".npz"), x=x, y=y)
    return path


def _batch(path: str) -> Any:
    import numpy as np

    with np.load(Path(path).with_suffix(".npz")) as batch:
        return batch["x"], batch["y"]


def trainer(name: str, path: str, rows: int, recompute: bool) -> Any:
    """A Trainer of one step a run."""
    from ortflex_core import Trainer

    return Trainer(
        path,
        batch_size=rows,
        backend={"name": "fused", "steps_per_run": 1},
        recompute=recompute,
        progress=False,
        threads=1,
        **arguments_of(name),
    )


def peak(name: str, path: str, recompute: str) -> dict[str, float]:
    """MiB of a process that makes three steps, in addition to what it had before the model was read."""
    batch = _batch(path)
    trainer("W4", _warm(path), 4, False)  # everything is imported then
    before = _resident()
    made = trainer(name, path, len(batch[0]), recompute == "True")
    for _ in range(3):
        made.step(batch)
    return {"mib": children.peak() - before}


def _warm(path: str) -> str:
    import numpy as np
    import onnx

    from tests import models

    ends = "float[N, 2] x", "float[N, 2] y"
    small = Path(path).with_name("small.onnx")
    onnx.save(models.parsed("y = MatMul(x, w)", {"w": np.ones((2, 2))}, *ends), small)
    return str(small)


def _resident() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) / 2**10


def estimate(name: str, path: str, recompute: str) -> dict[str, float]:
    """MiB by the estimate: all of it, and the tensors of the step."""
    from ortflex_core import estimate_memory

    rows = len(_batch(path)[0])
    given = {**arguments_of(name), "batch_size": rows, "recompute": recompute == "True"}
    report = estimate_memory(path, **given)
    own = report.parts["tensors of the step at its peak"]
    return {"mib": report.total / _MIB, "step": own / _MIB}


def seconds(name: str, path: str, count: str) -> dict[str, float]:
    """The time of a step, and the median of the ratios of a step with recompute=True."""
    import numpy as np

    batch = _batch(path)
    both = [trainer(name, path, len(batch[0]), way) for way in (False, True)]
    times = np.zeros((int(count) + 1, 2))
    for row in times:
        for k, made in enumerate(both):
            started = time.perf_counter()
            made.step(batch)
            row[k] = time.perf_counter() - started
    plain, again = times[1:].T
    return {"seconds": float(np.median(plain)), "ratio": float(np.median(again / plain))}


_MEASURES: dict[str, Any] = {"peak": peak, "estimate": estimate, "seconds": seconds}


fresh = functools.partial(children.measured, "tests.benchmarks.memory")
"""A measure in a process of its own."""


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks memory", description=__doc__)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--networks", nargs="*", default=list(NAMES))
    parser.add_argument("--rows", type=int, nargs="*", default=[0], help="0 is the usual number")
    parser.add_argument("--steps", type=int, default=7, help="how often a step is timed; 0: not")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(_MEASURES[options.one[0]](*options.one[1:])))
        return
    print("MiB: measured (estimated; of that the tensors of the step)")
    for name in options.networks:
        for rows in options.rows:
            with tempfile.TemporaryDirectory() as folder:
                path = str(write(name, rows, Path(folder)))
                cells = []
                for way in ("False", "True"):
                    measured, found = (
                        fresh("peak", name, path, way),
                        fresh("estimate", name, path, way),
                    )
                    cells.append(f"{measured['mib']:.0f} ({found['mib']:.0f}; {found['step']:.0f})")
                line = f"{name}, {rows or 'usual'} rows: plain {cells[0]}, recompute {cells[1]}"
                if options.steps:
                    found = fresh("seconds", name, path, str(options.steps))
                    line += f"; a step {found['seconds']:.3f} s, times {found['ratio']:.2f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
