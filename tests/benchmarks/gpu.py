"""Microseconds a step on a GPU, W1 to W10: torch eager and compiled, JAX's scan, and ours.

Every peer has a process of its own and a turn in every round, as in the table ``peers``. ``--device cpu``
runs the same table on a CPU, to try it; ``--steps`` makes its epochs shorter. A peer that cannot run has a
dash, and its reason below the table.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from statistics import median

from tests.benchmarks import table
from tests.benchmarks.peers_table import measure
from tests.benchmarks.workloads import IMAGES, WORKLOADS, find

PEERS = {
    "ortflex": "ours",
    "ortflex recorded": "ours, CUDA graphs",
    "ortflex xla": "ours on xla",
    "torch": "torch",
    "torch compiled": "torch.compile",
    "jax scan": "JAX scan",
}
GOALS = {"W1": 30, "W2": 30, "W3": 60, "W4": 120, "W5": 15, "W6": 25, "W7": 250, "W8": 500}
"""µs a step of our best on a GPU; on W1 to W6 torch also takes five times as long."""


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS, *IMAGES])
    parser.add_argument("--peer", action="append", choices=[*PEERS], help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="a turn, at least one epoch")
    parser.add_argument("--steps", type=int, default=0, help="of an epoch; 0: the workload's")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=PATH", help="its interpreter"
    )
    options = parser.parse_args(arguments)
    os.environ["ORTFLEX_BENCH_DEVICE"] = options.device
    os.environ["ORTFLEX_BENCH_STEPS"] = str(options.steps)
    pythons = dict(text.split("=", 1) for text in options.python)
    names = [n for n in PEERS if not options.peer or n in options.peer]
    print(table.heading(table.circumstances()), f"device {options.device}", sep=", ")
    print("\nµs a step, medians of the rounds\n")
    print("| | " + " | ".join(PEERS[n] for n in names) + " | goal |")
    print("|---" * (len(names) + 2) + "|", flush=True)
    reasons: dict[str, str] = {}
    for name in options.workload or [*WORKLOADS, *IMAGES]:
        workload = find(name)
        if options.steps:
            workload = workload._replace(rows=options.steps * workload.batch)
        found, missing, _ = measure(workload, names, pythons, options.rounds, options.seconds)
        times = {n: median(rounds) for n, rounds in found.items()}
        print(line(name, names, times, options.device == "cuda"), flush=True)
        reasons |= {f"{name}, {PEERS[n]}": reason for n, reason in missing.items()}
    for where, reason in reasons.items():
        print(f"- {where}: {reason}")


def line(name: str, names: list[str], times: Mapping[str, float], on_gpu: bool) -> str:
    """The line of a workload, and whether its goal was reached where the table is about a GPU."""
    cells = [f"{times[n]:.1f}" if n in times else "–" for n in names]
    goal = "–"
    if name in GOALS:
        goal = f"≤ {GOALS[name]}"
        ours = [times[n] for n in times if n.startswith("ortflex")]
        if on_gpu and ours:
            fast = min(ours) <= GOALS[name]
            small = name in ("W1", "W2", "W3", "W4", "W5", "W6") and "torch" in times
            reached = fast and (not small or times["torch"] >= 5 * min(ours))
            goal += ", reached" if reached else ", missed"
    return f"| {name} | " + " | ".join(cells) + f" | {goal} |"


if __name__ == "__main__":
    main(sys.argv[1:])
