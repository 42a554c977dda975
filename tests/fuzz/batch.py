"""Many mutants in a process of their own, which may die: how each of them ended.

By hand: ``python -m tests.fuzz.batch model 0 8000`` prints a summary and everything that is wrong.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SILENCE = 90
"""Seconds after which a process that says nothing waits for something that does not come."""
MIB = 1024
"""The most that a process may have taken at any time."""

Outcome = Mapping[str, Any]


def run(kind: str, first: int, count: int) -> Iterator[Outcome]:
    """How mutants ``first`` to ``first + count`` of a kind ended, in their order."""
    at, last = first, first + count
    while at < last:
        for outcome in _process(kind, at, last - at):
            yield outcome
            at = int(outcome["end"]) + 1


def wrong(outcome: Outcome) -> bool:
    """Neither success nor an ortflex error, or too much memory."""
    return outcome["outcome"] not in ("fine", "refused") or outcome.get("mib", 0) > MIB


def _process(kind: str, first: int, count: int) -> Iterator[Outcome]:
    """Outcomes until the process is through, dies, or has taken too much memory."""
    command = [sys.executable, "-m", "tests.fuzz.worker", kind, str(first), str(count)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    ) as process:
        try:
            yield from _listen(process, first, first + count)
        finally:
            process.kill()


def _listen(process: Any, first: int, last: int) -> Iterator[Outcome]:
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    listener = threading.Thread(target=_keep, args=(process.stderr, said), daemon=True)
    reader.start()
    listener.start()
    current, how = first, ""
    while True:
        try:
            line = lines.get(timeout=SILENCE)
        except queue.Empty:
            how = "waits"
            process.send_signal(signal.SIGABRT)  # faulthandler says where it is
            break
        if line is None:
            break
        event = json.loads(line)
        if "begin" in event:
            current = event["begin"]
            continue
        yield event
        current = event["end"] + 1
        if event["mib"] > MIB:
            process.kill()  # the peak of a process never falls: the next ones get a new one
            last = current
    try:
        code = process.wait(SILENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait(SILENCE)
    reader.join(SILENCE)
    listener.join(SILENCE)
    if current < last:
        how = how or ("takes too long" if code == -signal.SIGXCPU else f"died with {code}")
        yield _lost(current, how, said)


def _lost(number: int, how: str, said: list[str]) -> Outcome:
    text = "".join(said[-40:])
    return {"end": number, "of": "?", "outcome": "lost", "what": how, "text": text, "mib": 0}


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _keep(stream: Any, lines: list[str]) -> None:
    for line in stream:
        lines.append(line)
        del lines[:-200]


def summary(outcomes: list[Outcome]) -> str:
    """Counts, the slowest, the largest."""
    counts = Counter(o["outcome"] for o in outcomes)
    slow = max(outcomes, key=lambda o: o.get("seconds", 0))
    large = max(outcomes, key=lambda o: o["mib"])
    listed = ", ".join(f"{n} {name}" for name, n in counts.most_common())
    return (
        f"{len(outcomes)} mutants: {listed}; longest {slow.get('seconds')} s (number {slow['end']}), "
        f"memory at most {large['mib']} MiB"
    )


def main() -> None:
    kind, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    outcomes = []
    for outcome in run(kind, first, count):
        outcomes.append(outcome)
        if wrong(outcome):
            print(json.dumps(outcome), flush=True)
    print(kind, summary(outcomes), file=sys.stderr)


if __name__ == "__main__":
    main()
