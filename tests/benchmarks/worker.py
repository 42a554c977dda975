"""One peer in a process of its own: ``python -m tests.benchmarks.worker W1 torch``.

Answers every line of standard input, a number of epochs, with a line of JSON: the seconds they took,
those of processor time, and the mean loss of the last one. The first answer, unasked, says who is there.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", os.environ.get("ORTFLEX_BENCH_THREADS", "1")
)  # before anybody loads a BLAS

import json
import sys
import time
from typing import Any

from tests.benchmarks.peers import PEERS, Absent, mean, version
from tests.benchmarks.workloads import find


def main(workload: str, peer: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        run = PEERS[peer][0](find(workload))
        loss = mean(run(1))
    except (ImportError, Absent) as error:
        answer(missing=str(error))
        return
    answer(version=version(peer), loss=loss)
    for line in sys.stdin:
        started, processor = time.perf_counter(), time.process_time()
        losses = run(int(line))
        times = {
            "wall": time.perf_counter() - started,
            "processor": time.process_time() - processor,
        }
        answer(**times, loss=mean(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
