"""What 8, 64 and 512 processes cost, by a model of latency and bandwidth that is fitted to measurements.

``python -m tests.benchmarks.distributed_model`` measures on this machine, prints the tables of
docs/explanation/distributed-cost.md and writes its picture. ``--given ALPHA BETA SIGMA`` takes the numbers
(µs, and GB/s twice) instead of measuring messages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import numpy as np

from ortflex_core import Trainer, internals_of
from tests.benchmarks.distributed import Member, trainer_of
from tests.benchmarks.workloads import WORKLOADS, data, weights
from tests.training import plugins

NAMES = ("W1", "W4", "W7", "W8")
RANKS = (2, 8, 64, 512)
PICTURE = Path(__file__).parents[2] / "docs" / "explanation" / "distributed-cost.svg"


@attrs.frozen
class Network:
    """Seconds a message takes to begin, bytes a second, and bytes a second that are added up."""

    latency: float
    bandwidth: float
    adding: float

    def gathered(self, ranks: int, size: float) -> float:
        """All gradients to all, every process adds up: what ortflex does."""
        others = ranks - 1
        return others * (self.latency + size / self.bandwidth + size / self.adding)

    def sliced(self, ranks: int, size: float) -> float:
        """Every process adds up a slice in the order of the ranks, then all get all slices."""
        others, part = ranks - 1, size / ranks
        return 2 * others * (self.latency + part / self.bandwidth) + others * part / self.adding

    def free(self, ranks: int, size: float) -> float:
        """A sum in any order: by halves and doubles, log₂ N messages each way."""
        others = (ranks - 1) / ranks * size
        steps = 2 * np.ceil(np.log2(ranks))
        return float(steps * self.latency + 2 * others / self.bandwidth + others / self.adding)


@attrs.frozen
class Step:
    """What a step computes: the gradient of a batch, the update, and the bytes of all gradients."""

    gradient: float
    update: float
    size: int


WAYS: Mapping[str, Callable[[Network, int, float], float]] = {
    "gathered": Network.gathered,
    "ordered slices": Network.sliced,
    "order-free": Network.free,
}


def fitted(times: Mapping[int, float], adding: float) -> Network:
    """Latency and bandwidth of messages by least squares of relative errors.

    >>> found = fitted({0: 1e-5, 1000: 1.1e-5, 10**6: 1.01e-3}, adding=1e10)
    >>> round(found.latency * 1e6, 6), round(found.bandwidth / 1e9, 6)
    (10.0, 1.0)
    """
    sizes, seconds = np.array(list(times), float), np.array(list(times.values()))
    rows = np.stack([np.ones_like(sizes), sizes], 1) / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones_like(seconds), rcond=None)
    return Network(max(float(latency), 1e-9), 1 / max(float(per_byte), 1e-15), adding)


def adding() -> float:
    """Bytes of one of two arrays that numpy adds in a second."""
    a, b = (np.ones(1 << 19, np.float32) for _ in range(2))
    times = []
    for _ in range(200):
        start = time.perf_counter()
        np.add(a, b, out=a)
        times.append(time.perf_counter() - start)
    return a.nbytes / statistics.median(times)


def step_of(name: str) -> Step:
    """Seconds of a gradient and of an update, from steps of two and of four batches in one process."""
    workload, seconds = WORKLOADS[name], {}
    x, y, weight = data(workload)
    trainer = trainer_of(workload, None)
    for batches in (2, 4):
        options = {**internals_of(trainer).arguments, "accumulate": batches, "epochs": 1}
        made, times = Trainer(trainer.model, **options, plugins=plugins()), []
        for _ in range(4):
            # Of the processor, which other programs on this machine do not lengthen much.
            start = time.process_time()
            made.fit(x, y, weight)
            times.append(time.process_time() - start)
        seconds[batches] = min(times[1:]) / -(-workload.steps // batches)
    gradient = (seconds[4] - seconds[2]) / 2
    size = sum(array.nbytes for array in weights(workload))
    return Step(gradient, max(seconds[2] - 2 * gradient, 0.0), size)


def print_steps(steps: Mapping[str, Step], network: Network) -> None:
    """Milliseconds a step with each way of adding up, and how much of it the processes compute."""
    print("| | bytes | way | " + " | ".join(f"{n} processes" for n in RANKS) + " |")
    print("|---|---|---|" + "---|" * len(RANKS))
    for name, step in steps.items():
        own = step.gradient + step.update
        for way, seconds in WAYS.items():
            costs = [seconds(network, n, step.size) for n in RANKS]
            cells = [f"{1e3 * (own + c):.3g} ms, {own / (own + c):.0%}" for c in costs]
            print(f"| {name} | {step.size:,} | {way} | " + " | ".join(cells) + " |")


def print_limits(steps: Mapping[str, Step], network: Network) -> None:
    """The most processes with which messages take no longer than the computation."""
    print("\n| | " + " | ".join(WAYS) + " |\n|---|" + "---|" * len(WAYS))
    for name, step in steps.items():
        own = step.gradient + step.update
        cells = []
        for seconds in WAYS.values():
            fits = [n for n in range(2, 100_001) if seconds(network, n, step.size) <= own]
            cells.append(f"{max(fits):,}" if fits else "none")
        print(f"| {name} | " + " | ".join(cells) + " |")


def draw(steps: Mapping[str, Step], networks: Mapping[str, Network]) -> None:
    """The share of a step that is computation, by the number of processes."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "ortflex"  # the same file each time
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    ranks = np.unique(np.geomspace(2, 1024, 60).astype(int))
    for column, (label, network) in enumerate(networks.items()):
        axes = figure.add_subplot(1, len(networks), column + 1)
        for color, (name, step) in zip(("C0", "C1", "C2", "C3"), steps.items(), strict=True):
            own = step.gradient + step.update
            for (way, seconds), line in zip(WAYS.items(), ("-", "--", ":"), strict=True):
                shares = [own / (own + seconds(network, int(n), step.size)) for n in ranks]
                text = f"{name}, {way}" if column == 0 else None
                axes.semilogx(ranks, shares, line, color=color, label=text, base=2)
        axes.set(xlabel="processes", title=label, ylim=(0, 1))
        if not column:
            axes.set_ylabel("computation in a step")
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--given", type=float, nargs=3, metavar=("ALPHA", "BETA", "SIGMA"), help="µs, GB/s, GB/s"
    )
    given = parser.parse_args().given
    if given:
        here = Network(given[0] * 1e-6, given[1] * 1e9, given[2] * 1e9)
    else:
        member = Member("messages", "two, mpi")
        found = member.ask("messages")
        member.close()
        least = {n.removeprefix("least "): t for n, t in found.items() if n.startswith("least ")}
        here = fitted({int(n): t for n, t in least.items() if n.isdigit()}, adding())
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print(
        f"latency {1e6 * here.latency:.1f} µs, bandwidth {here.bandwidth / 1e9:.2f} GB/s, "
        f"adding {here.adding / 1e9:.2f} GB/s\n"
    )
    steps = {name: step_of(name) for name in NAMES}
    for name, step in steps.items():
        print(f"{name}: gradient {1e3 * step.gradient:.3g} ms, update {1e3 * step.update:.3g} ms")
    ethernet = Network(30e-6, 1.25e9, here.adding)
    networks = {"messages as on this machine": here, "30 µs and 10 Gbit/s": ethernet}
    for label, network in networks.items():
        print(f"\n{label}\n")
        print_steps(steps, network)
        print_limits(steps, network)
    draw(steps, networks)


if __name__ == "__main__":
    main()
