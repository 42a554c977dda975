"""The kit of process groups; its checks run in processes that a launcher starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ortflex_core import Array, Communicator, GradientExchange, Peers, ProcessGroup, RankFailed
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing.component import ComponentKit
from ortflex_core.testing.running import check_reasons, plugins, require

SECONDS = 120.0
SIZES = (1, 7, 1000, 100_003, 10_000_000)
"""Bytes of the messages."""

Members = Callable[[int, str], list[Any]]


class ProcessGroupKit(ComponentKit):
    """Override ``component``, and ``launcher`` and ``environ`` if its launcher is not like torchrun."""

    kind: ClassVar[str] = "process_groups"
    has_formula: ClassVar[bool] = False

    @pytest.fixture
    def launcher(self) -> Callable[[int], Sequence[str]]:
        """The start of a command that runs a number of Python processes; ``-m module`` follows."""
        return lambda size: [sys.executable, "-m", "ortflex_core.testing.launch", str(size)]

    @pytest.fixture
    def environ(self) -> Mapping[str, str]:
        """The variables that the launcher sets in the first of two processes; by default torchrun's."""
        return _environment(2)

    @pytest.fixture
    def members(
        self,
        component: ProcessGroup,
        launcher: Callable[[int], Sequence[str]],
        environ: Mapping[str, str],
        tmp_path: Path,
    ) -> Members:
        """A function that runs a job in processes and returns each result, None for unfinished jobs."""
        if reasons := type(component).unavailable(environ):
            pytest.skip("; ".join(reasons))

        def run(size: int, job: str) -> list[Any]:
            spec = json.dumps(plugins().described(self.kind, component))
            call = [*launcher(size), "-m", __name__, job, spec, str(tmp_path)]
            done = subprocess.run(
                call, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            paths = [tmp_path / f"{job}-{rank}.json" for rank in range(size)]
            found = [json.loads(p.read_text("utf-8")) if p.exists() else None for p in paths]
            require(
                job == "end" or None not in found,
                f"a process did not finish:\n{done.stdout[-2000:]}{done.stderr[-4000:]}",
            )
            return found

        return run

    def test_unavailable(self, component: ProcessGroup) -> None:
        """The reasons are sentences if no launcher has set a variable."""
        reasons = type(component).unavailable({})
        check_reasons(reasons)
        require(reasons, "unavailable({}) returns no reason, but no launcher started this process")

    def test_messages(self, members: Members) -> None:
        """Three processes get the arrays of all processes by rank, for any sizes and delays."""
        require(
            members(3, "talk") == [{"rank": k, "size": 3, "wrong": []} for k in range(3)],
            "the messages of three processes are not what was sent",
        )

    def test_sums(self, members: Members) -> None:
        """Gradients are added in the order of the ranks, in their own precision, to the same bits."""
        digests = members(3, "add")
        require(digests == [digests[0]] * 3, f"the sums differ between processes: {digests}")
        require(digests[0] == _sum_of(3), "the sum is not that of numpy in the order of the ranks")

    def test_a_process_that_ends(self, members: Members) -> None:
        """If a process ends, the others end, too: with an error, or by their launcher."""
        start = time.monotonic()
        found = members(2, "end")
        require(found[0] in (None, "RankFailed"), f"the other process ended with {found[0]}")
        require(time.monotonic() - start < SECONDS / 2, "the other process waited for too long")


def _environment(size: int) -> dict[str, str]:
    """The variables that torchrun would set in the first process."""
    own = {"RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return {**os.environ, **own}


def _message(rank: int, size: int) -> Array:
    return ((np.arange(size) * 7 + rank * 31) % 251).astype(np.uint8)


def _talk(communicator: Communicator) -> dict[str, Any]:
    rank, wrong = communicator.rank, []
    for size in (*SIZES, *[64] * 40):
        time.sleep(0.3 * (rank == 1 and size == SIZES[0]) + 0.001 * ((rank * 7 + size) % 3))
        given = communicator.all_gather(_message(rank, size))
        expected = [_message(k, size) for k in range(communicator.size)]
        if not all(np.array_equal(a, b) for a, b in zip(given, expected, strict=True)):
            wrong.append(size)
    return {"rank": rank, "size": communicator.size, "wrong": wrong}


def _gradients(rank: int) -> Arrays:
    rng = np.random.default_rng(rank)
    return {
        "w": rng.standard_normal((300, 7)).astype(np.float32) * np.float32(10.0**rank),
        "b": rng.standard_normal(5),
        "h": rng.standard_normal(9).astype(np.float16),
    }


def _add(communicator: Communicator) -> list[str]:
    peers = Peers(communicator)
    exchange = GradientExchange(peers, _gradients(0), 1)
    for name, array in _gradients(peers.rank).items():
        exchange.own[name][...] = array
    exchange.costs[0] = peers.rank
    costs = exchange.add(0, peers.size)
    require(costs == [[float(k)] for k in range(peers.size)], f"the costs are {costs}")
    return [array.tobytes().hex()[:4000] for array in exchange.sums.values()]


def _sum_of(size: int) -> list[str]:
    parts = [_gradients(k) for k in range(size)]
    sums = []
    for name, total in parts[0].items():
        for part in parts[1:]:
            total = total + part[name]
        sums.append(total.tobytes().hex()[:4000])
    return sums


def _end(communicator: Communicator) -> str:
    peers = Peers(communicator)
    peers.any("start", flag=False)
    if peers.rank == 1:
        os._exit(3)
    try:
        peers.any("next", flag=False)
    except RankFailed as error:
        return type(error).__name__
    return "nothing"


_JOBS: Mapping[str, Callable[[Communicator], Any]] = {"talk": _talk, "add": _add, "end": _end}


def _work(job: str, spec: str, folder: str) -> None:
    """Run a job in a process that the launcher has started."""
    communicator = plugins().component("process_groups", json.loads(spec)).join()
    path = Path(folder) / f"{job}-{communicator.rank}.json"
    result = json.dumps(_JOBS[job](communicator))
    path.with_suffix(".part").write_text(result, "utf-8")
    path.with_suffix(".part").rename(path)
    if job == "end":
        os._exit(0)  # at its exit, a library may wait for the process that has ended


if __name__ == "__main__":
    _work(*sys.argv[1:])
