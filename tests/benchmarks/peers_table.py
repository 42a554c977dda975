"""Microseconds a step compared with the peers, on the eight workloads; W9 and W10 on request.

Every peer has a process of its own, with an interpreter of its own where that is needed, and they
take turns: a round gives each about the same time, in another order each round, and only one of
them works at any moment. What counts is the median over rounds of (peer / ours) within the round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import children
from tests.benchmarks import table
from tests.benchmarks.peers import PEERS
from tests.benchmarks.workloads import IMAGES, WORKLOADS, Workload

ON_GPU = {"ortflex recorded", "torch compiled"}
"""Peers of the table of a GPU; on a CPU they take part if they are named."""


class Process:
    """A peer at work on a workload."""

    def __init__(self, workload: Workload, peer: str, python: str, clock: str = "wall") -> None:
        self._clock = clock
        self._process = subprocess.Popen(
            [python, "-m", "tests.benchmarks.worker", workload.name, peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=children.with_tests(OMP_NUM_THREADS=os.environ.get("ORTFLEX_BENCH_THREADS", "1")),
        )
        self.steps = workload.steps
        self.epochs = 1
        self.hello = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)  # type: ignore[no-any-return]
        assert self._process.stderr is not None
        text = self._process.stderr.read().strip().splitlines() or ["no answer"]
        return {"missing": text[-1][:200]}

    def turn(self, epochs: int | None = None) -> float:
        """µs a step of so many epochs."""
        assert self._process.stdin is not None
        count = epochs or self.epochs
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return float(self._answer()[self._clock]) / (count * self.steps) * 1e6

    def settle(self, seconds: float) -> None:
        """Warm up, then choose how many epochs a turn has."""
        self.turn(1)
        once = self.turn(1) * self.steps / 1e6
        self.epochs = max(1, min(400, round(seconds / once)))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def measure(
    workload: Workload,
    names: list[str],
    pythons: Mapping[str, str],
    rounds: int,
    seconds: float,
    clock: str = "wall",
) -> tuple[dict[str, list[float]], dict[str, str], dict[str, Any]]:
    """µs a step round by round, why others are missing, and what each said at the start."""
    running: dict[str, Process] = {}
    missing: dict[str, str] = {}
    try:
        for name in names:
            process = Process(workload, name, pythons.get(name, sys.executable), clock)
            if "missing" in process.hello:
                missing[name] = process.hello["missing"]
                process.close()
            else:
                running[name] = process
                process.settle(seconds)
        found: dict[str, list[float]] = {name: [] for name in running}
        for k in range(rounds):
            order = list(running)
            order = order[k % len(order) :] + order[: k % len(order)]
            for name in order:
                found[name].append(running[name].turn())
    finally:
        for process in running.values():
            process.close()
    return found, missing, {name: p.hello for name, p in running.items()}


def main(arguments: list[str] | None = None) -> None:
    """Measure the workloads asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks peers", description=__doc__)
    parser.add_argument(
        "--workload", action="append", choices=[*WORKLOADS, *IMAGES], help="default: W1 to W8"
    )
    parser.add_argument("--peer", action="append", choices=[*PEERS], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clock",
        choices=["processor", "wall"],
        help="by default processor time, which depends little on other processes, for one thread, and "
        "elapsed time for several",
    )
    parser.add_argument("--threads", type=int, default=1, help="of every peer")
    parser.add_argument("--seconds", type=float, default=0.15, help="a turn, at least one epoch")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=PATH", help="its interpreter"
    )
    parser.add_argument("--results", type=Path, default=table.RESULTS / "peers.csv")
    options = parser.parse_args(arguments)
    options.clock = options.clock or ("processor" if options.threads == 1 else "wall")
    os.environ["ORTFLEX_BENCH_THREADS"] = str(options.threads)
    pythons = dict(text.split("=", 1) for text in options.python)
    names = [n for n in PEERS if n in (options.peer or PEERS.keys() - ON_GPU) or n == "ortflex"]
    print(
        table.heading(table.circumstances()),
        f"{options.clock} time, threads {options.threads}",
        sep=", ",
    )
    for name in options.workload or WORKLOADS:
        workload = {**WORKLOADS, **IMAGES}[name]
        how = (options.rounds, options.seconds, options.clock)
        found, missing, hello = measure(workload, names, pythons, *how)
        if "ortflex" not in found:
            print(f"\n{name}  ortflex could not be measured: {missing['ortflex']}")
            continue
        table.show(workload, found, missing)
        versions = {n: h["version"] for n, h in hello.items()}
        losses = {n: h["loss"] for n, h in hello.items()}
        lines = table.lines(workload, found, versions, losses)
        table.append(lines, list(lines[0]), options.results)
    print(f"\nAppended to {options.results}")


if __name__ == "__main__":
    main()
