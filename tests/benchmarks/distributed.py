"""Two processes with one thread each, next to one process with accumulate=2 and to torch's own.

``python -m tests.benchmarks distributed`` prints the time of an epoch of each, alternating in one run, and
what the messages cost. Ratios below 1 are in favor of two processes.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from tests import children
from tests.benchmarks.workloads import WORKLOADS, Workload, data

PEERS = (
    "one process",
    "two, torch",
    "two, mpi",
    "two, torch, step",
    "two, mpi, step",
    "two, torch, sync_every=5",
    "torch, one",
    "torch DDP",
)
ROUNDS, EPOCHS = 5, 3
SIZES = (0, 1_000, 10_000, 100_000, 1_000_000, 4_000_000, 16_000_000)
"""Bytes of the messages that are timed."""


def main(arguments: list[str]) -> None:
    """Print the tables."""
    if arguments and arguments[0] == "--serve":
        serve(*arguments[1:])
        return
    names = [a for a in arguments if a in WORKLOADS] or ["W7", "W8"]
    rounds = next((int(a[9:]) for a in arguments if a.startswith("--rounds=")), ROUNDS)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n")
    for name in names:
        print_epochs(WORKLOADS[name], rounds)
    print_messages()
    print(f"\nload of the machine at the end: {os.getloadavg()[0]:.1f}")


# ---------------------------------------------------------------------- the tables


def print_epochs(workload: Workload, rounds: int) -> None:
    """Milliseconds an epoch of every peer, and their ratio to one process."""
    members: dict[str, Member] = {}
    for peer in PEERS:
        member = Member(workload.name, peer)
        if member.missing:
            print(f"{peer}: left out, {member.missing}")
        else:
            members[peer] = member
    times: dict[str, list[float]] = {peer: [] for peer in members}
    processor: dict[str, list[float]] = {peer: [] for peer in members}
    for _ in range(rounds):
        for peer, member in members.items():
            seconds, own = member.epoch()
            times[peer].append(seconds)
            processor[peer].append(own)
    for member in members.values():
        member.close()
    print(f"{workload.name}, {workload.text}: {workload.rows} rows, one thread in each process\n")
    print(
        "| | ms an epoch | compared with one process | of each round | processor's ms of rank 0 |"
    )
    print("|---|---|---|---|---|")
    first = times["one process"]
    for peer, own in times.items():
        ratios = [a / b for a, b in zip(own, first, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        middle = statistics.median(ratios)
        least = 1e3 * min(processor[peer])
        print(
            f"| {peer} | {1e3 * statistics.median(own):.1f} | {middle:.2f} | {spread} | {least:.1f} |"
        )
    print(flush=True)


def print_messages() -> None:
    """What a message of all to all costs, by itself and in memory that both see."""
    found = {}
    for group in ("torch", "mpi"):
        member = Member("messages", f"two, {group}")
        found[group] = {} if member.missing else member.ask("messages")
        member.close()
    print("| bytes | torch, µs | mpi, µs | in common memory, µs |\n|---|---|---|---|")
    for size in SIZES:
        own = [found[g].get(str(size)) for g in ("torch", "mpi")]
        shared = next((f[f"shared {size}"] for f in found.values() if f"shared {size}" in f), None)
        cells = [f"{1e6 * t:.0f}" if t is not None else "not here" for t in (*own, shared)]
        print(f"| {size:,} | " + " | ".join(cells) + " |")


# ---------------------------------------------------------------------- processes


class Member:
    """Processes that train epochs when they are asked to."""

    def __init__(self, workload: str, peer: str) -> None:
        self.missing = ""
        started = [sys.executable]
        if peer not in ("one process", "torch, one"):
            started = children.ranks("mpi" if "mpi" in peer else "torch", 2)
        if shutil.which(started[0]) is None:
            self.missing = "there is no mpiexec"
            return
        call = [*started, "-m", "tests.benchmarks", "distributed", "--serve", workload, peer]
        pipe = subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(call, stdin=pipe, stdout=pipe, text=True, env=environment)
        answer = self._answer()
        self.missing = answer.get("missing", "")

    def epoch(self) -> tuple[float, float]:
        """Seconds an epoch, by the clock and of the processor that rank 0 had."""
        answer = self.ask("epochs")
        return answer["seconds"] / EPOCHS, answer["processor"] / EPOCHS

    def ask(self, what: str) -> Any:
        """The answer of rank 0."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the processes."""
        if not self.missing:
            self.ask("end")
            self._process.wait(60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        return {"missing": "it ended"}


def serve(name: str, peer: str) -> None:
    """One of the processes: rank 0 reads what to do and tells the others."""
    sent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between
    rank = children.rank()

    def answer(**values: Any) -> None:
        if not rank:
            sent.write(json.dumps(values) + "\n")
            sent.flush()

    try:
        run, hear = prepared(name, peer)
        run("epochs")
    except ImportError as error:
        answer(missing=str(error))
        return
    answer(ready=True)
    while True:
        line = hear(sys.stdin.readline().strip() if not rank else "")
        if line in ("", "end"):
            answer(ended=True)
            return
        started, used = time.perf_counter(), time.process_time()
        found = run(line)
        seconds, own = time.perf_counter() - started, time.process_time() - used
        answer(**(found or {"seconds": seconds, "processor": own}))


def prepared(name: str, peer: str) -> tuple[Any, Any]:
    """What trains, and what tells all ranks a line."""
    if peer.startswith("torch"):
        return torch_of(WORKLOADS[name], peer)
    from ortflex_core import Peers
    from ortflex_core.training.engines.joining import join
    from tests.training import plugins

    group = None if peer == "one process" else "mpi" if "mpi" in peer else "torch"
    if group == "mpi":
        import mpi4py  # noqa: F401  # or it is left out
    peers: Peers | None = join(plugins(), group)

    def hear(line: str) -> str:
        if group == "mpi":
            wait_asleep()
        return line if peers is None else str(peers.values("line", line)[0])

    if name == "messages":
        assert peers is not None
        return lambda line: timed(peers) if line == "messages" else None, hear
    trainer = trainer_of(WORKLOADS[name], group, peer)
    x, y, _ = data(WORKLOADS[name])

    def run(line: str) -> None:
        if not peer.endswith("step"):
            trainer.fit(x, y)
            return
        # Trainer.step: each process gives batches of its own.
        size = WORKLOADS[name].batch
        starts = [(2 * k + children.rank()) * size for k in range(len(x) // (2 * size))]
        for start in starts * EPOCHS:
            trainer.step((x[start : start + size], y[start : start + size]))

    return run, hear


def wait_asleep() -> None:
    """Wait for all ranks of MPI without the processor, which the peer whose turn it is has for itself.

    MPI's own calls wait in a loop that occupies a processor.
    """
    from mpi4py import MPI

    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def trainer_of(workload: Workload, group: str | None, peer: str = "") -> Any:
    """The Trainer of a workload, on one thread."""
    from ortflex_core import Trainer
    from tests.benchmarks.onnx_network import network
    from tests.training import plugins

    options: dict[str, Any] = {"accumulate": 2} if group is None else {"distributed": group}
    if "sync_every" in peer:
        options["sync_every"] = int(peer.rpartition("=")[2])
    return Trainer(
        network(workload),
        loss=workload.loss,
        optimizer=workload.optimizer,
        learning_rate=workload.rate,
        reduction=workload.reduction,
        batch_size=workload.batch,
        epochs=EPOCHS,
        backend={"name": "fused", "steps_per_run": 1},
        threads=1,
        progress=False,
        plugins=plugins(),
        **options,
    )


def torch_of(workload: Workload, peer: str) -> tuple[Any, Any]:
    """The same network in torch: DistributedDataParallel, or one process with two batches a step."""
    import torch
    import torch.distributed as dist

    from tests.benchmarks.torch_network import forward, loss_of
    from tests.benchmarks.workloads import weights

    torch.set_num_threads(1)
    several = peer == "torch DDP"
    x, y = (torch.from_numpy(a) for a in data(workload)[:2])
    inner: Any = torch.nn.Module()
    inner.held = torch.nn.ParameterList(torch.from_numpy(w) for w in weights(workload))
    inner.forward = lambda rows: forward(workload, rows, list(inner.held))
    module = inner
    rank = 0
    if several:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        module = torch.nn.parallel.DistributedDataParallel(inner)
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "momentum": torch.optim.SGD,
    }
    options = {"momentum": 0.9} if workload.optimizer == "momentum" else {}
    made = kinds[workload.optimizer](module.parameters(), lr=workload.rate, **options)
    size = workload.batch

    def run(line: str) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(EPOCHS):
            order = torch.randperm(workload.rows, generator=generator)
            total = torch.zeros(())
            for start in range(0, workload.rows, 2 * size):
                made.zero_grad()
                mine = (rank,) if several else (0, 1)
                for k in mine:
                    rows = order[start + k * size : start + (k + 1) * size]
                    loss = loss_of(workload, module(x[rows]), y[rows], None) / len(mine)
                    loss.backward()
                    total += loss.detach()
                made.step()

    def hear(line: str) -> str:
        if not several:
            return line
        held = [line]
        dist.broadcast_object_list(held, 0)
        return str(held[0])

    return run, hear


def timed(peers: Any) -> dict[str, float]:
    """Seconds of a message of every size, by itself and in memory that both see."""
    from ortflex_core.training.engines.mailbox import Mailbox

    out: dict[str, float] = {}
    for size in SIZES:
        repeats = 100 if size < 1_000_000 else 20
        packet = np.zeros(size, np.uint8)
        for label, once in (
            (str(size), lambda packet=packet: peers.gather("timing", packet)),
            (f"shared {size}", _shared(Mailbox(peers, size, shared=True), packet)),
        ):
            once()
            times = []
            for _ in range(repeats):
                started = time.perf_counter()
                once()
                times.append(time.perf_counter() - started)
            out[label] = statistics.median(times)
            out[f"least {label}"] = min(times)
    return out


def _shared(mailbox: Any, packet: Any) -> Any:
    """Writes a packet and exchanges it."""

    def once() -> None:
        np.copyto(mailbox.packets[mailbox.turn], packet)
        mailbox.exchange("timing")

    return once
