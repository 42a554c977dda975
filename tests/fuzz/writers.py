"""Processes that save to one place at the same moment, and processes that are killed while they do.

``python -m tests.fuzz.writers race FOLDER WRITERS ROUNDS yes`` and ``… kill FOLDER SEED COUNT no`` print
what was wrong, and a count; yes or no is whether folders are exchanged in one step. They are forked from
that process, which has no threads: a fork of one that has some may wait for ever for what they hold.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ortflex_core import OrtflexError, Progress, Saved
from ortflex_core.training.artifacts import artifact_folders as folders
from ortflex_core.training.artifacts import checkpoint
from ortflex_core.training.artifacts.checkpoint import Written
from ortflex_core.training.artifacts.checkpoint_record import FORMAT, Record
from tests import children

ELEMENTS = 2000


def save(place: Path, writer: int, turn: int, before: Written | None = None) -> Written:
    """A checkpoint of which every part says who wrote it and when."""
    mark = 1000 * turn + writer
    record = Record(
        format=FORMAT,
        structure="0" * 64,
        arguments={"mark": mark},
        unnamed=(),
        versions={},
        runtime="none",
        backend=None,
        size=None,
        fits=mark,
        manual=Progress(),
        position=None,
        frozen={},
    )
    arrays = {"parameter": {"w": np.full(ELEMENTS, mark, np.int64)}}

    def export(path: Path) -> None:
        path.write_bytes(b"%d" % writer * 500)

    return checkpoint.write(place, record, arrays, Saved(), export, before)


def mark_of(place: Path) -> int:
    """Who wrote a checkpoint and when, if all of its parts say the same."""
    found = checkpoint.read(place)
    mark = found.record.fits
    assert found.record.arguments["mark"] == mark
    assert (found.arrays["parameter/w"] == mark).all()
    return mark


def _writer(place: Path, number: int, rounds: int, barrier: Any, out: Any) -> None:
    rng, before = Random(number), None
    for turn in range(rounds):
        barrier.wait(60)
        time.sleep(rng.random() * 0.002)
        try:
            before = save(place, number, turn, before)
        except OrtflexError as error:
            out.put(f"round {turn}, writer {number}: {error}")
        barrier.wait(60)
        barrier.wait(60)  # while the parent looks


def _reader(place: Path, stop: Any, out: Any) -> None:
    count = 0
    while not stop.is_set():
        try:
            mark_of(place)
        except (AssertionError, OrtflexError) as error:
            out.put(f"reader: {type(error).__name__}: {error}")
        count += 1
    out.put(count)


def attacked(what: str, place: Path, *numbers: int, in_one_step: bool) -> tuple[list[str], int]:
    """``race`` or ``kill`` in a process of its own."""
    given = [what, str(place), *map(str, numbers), "yes" if in_one_step else "no"]
    call = [sys.executable, "-m", "tests.fuzz.writers", *given]
    run = children.run(call, seconds=200 + numbers[-1], check=True, cwd=Path(__file__).parents[2])
    problems, count = json.loads(run.stdout)
    return problems, count


def race(place: Path, writers: int, rounds: int) -> tuple[list[str], int]:
    """Several processes save at once, while one reads; what went wrong, and how often was read."""
    context = multiprocessing.get_context("fork")
    barrier, out, stop = context.Barrier(writers + 1), context.Queue(), context.Event()
    save(place, 0, 0)
    processes = [
        context.Process(target=_writer, args=(place, k, rounds, barrier, out))
        for k in range(writers)
    ]
    reader = context.Process(target=_reader, args=(place, stop, out))
    for process in (*processes, reader):
        process.start()
    problems: list[str] = []
    for turn in range(rounds):
        barrier.wait(60)
        barrier.wait(60)
        mark = mark_of(place)
        if mark // 1000 != turn:
            problems.append(f"round {turn}: the checkpoint is of round {mark // 1000}")
        if [p.name for p in place.parent.iterdir()] != [place.name]:
            problems.append(f"round {turn}: {sorted(p.name for p in place.parent.iterdir())}")
        barrier.wait(60)
    for process in processes:
        process.join(60)
    stop.set()
    reads = 0
    while True:
        message = out.get(timeout=60)
        if isinstance(message, int):
            reads = message
            break
        problems.append(message)
    reader.join(60)
    for process in (*processes, reader):
        if process.is_alive():
            process.kill()
            problems.append(f"{process.name} did not end")
    return problems, reads


def kill(place: Path, seed: int, count: int) -> tuple[list[str], int]:
    """A process saves to one place again and again and is killed; what was lost, and how many were killed.

    The folders that they leave are cleared by later ones.
    """
    context = multiprocessing.get_context("fork")
    rng, problems, last = Random(seed), [], 0
    save(place, 0, 0)
    for number in range(1, count + 1):
        process = context.Process(target=_save_for_ever, args=(place, last + 1))
        process.start()
        time.sleep(rng.uniform(0.002, 0.03))
        process.kill()
        process.join(60)
        try:
            mark = mark_of(place) // 1000
        except (AssertionError, OrtflexError) as error:
            problems.append(f"kill {number}: {type(error).__name__}: {error}")
            continue
        if mark < last:
            problems.append(f"kill {number}: round {mark} came after {last}")
        last = mark
    for left in _left(place):
        os.utime(left, (0, 0))  # an empty folder counts as left over after a while
    save(place, 0, last + 1)
    problems += [f"left over: {left.name}" for left in _left(place)]
    return problems, count


def _left(place: Path) -> Iterator[Path]:
    yield from [p for p in place.parent.iterdir() if p != place]


def _save_for_ever(place: Path, turn: int) -> None:
    before = None
    while True:
        before = save(place, 0, turn, before)
        turn += 1


def main() -> None:
    what, place, first, second, in_one_step = sys.argv[1:]
    if in_one_step == "no":
        folders.exchange = lambda a, b: False
    attack = {"race": race, "kill": kill}[what]
    print(json.dumps(attack(Path(place), int(first), int(second))))


if __name__ == "__main__":
    main()
