"""Packets in memory that all processes see, and by messages where there is none."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ortflex_core import Peers, ThreadGroup, run_ranks
from ortflex_core.training.engines import mailbox as module
from ortflex_core.training.engines.mailbox import Mailbox
from tests import children
from tests.core.test_process_groups import results

pytestmark = pytest.mark.once

HERE = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no files in memory here")


def talk(shared: bool, size: int = 5000, rounds: int = 7) -> list[list[Any]]:
    """What each of three processes gets in every round, when all have written what comes next."""

    def job(group: ThreadGroup) -> Any:
        peers = Peers(group.join())
        box = Mailbox(peers, size, shared=shared)
        assert box.shared is shared
        box.packets[box.turn][:] = peers.rank
        got = []
        for number in range(1, rounds + 1):
            parts = box.exchange("round")
            if shared:
                box.packets[box.turn][:] = 10 * number + peers.rank
            time.sleep(0.002 * ((peers.rank + number) % 3))
            got.append([(len(p), *sorted(set(p.tolist()))) for p in parts])
            if not shared:
                box.packets[box.turn][:] = 10 * number + peers.rank
        return got

    return results(run_ranks(3, job))


@HERE
def test_common_memory_gives_what_messages_give() -> None:
    expected = [[(5000, 10 * n + k) for k in range(3)] for n in range(7)]
    assert talk(True) == talk(False) == [expected] * 3


def sums(size: int, **options: bool) -> Any:
    """Whether each of two processes has shared memory, and the sums of the packets that it gets."""

    def job(group: ThreadGroup) -> Any:
        peers = Peers(group.join())
        box = Mailbox(peers, size, **options)
        box.packets[box.turn][:] = peers.rank + 1
        return box.shared, [int(p.sum()) for p in box.exchange("test")]

    return results(run_ranks(2, job))


def test_packets_of_no_bytes_need_no_memory() -> None:
    assert sums(0, shared=True) == [(False, [0, 0])] * 2


@pytest.fixture
def left() -> Iterator[None]:
    """No file stays."""
    before = set(Path("/dev/shm").glob("ortflex-*"))
    yield
    assert set(Path("/dev/shm").glob("ortflex-*")) <= before


@HERE
@pytest.mark.parametrize("what", ["no room", "another machine of the same name", "no folder"])
def test_without_shared_memory_processes_use_messages(
    what: str, monkeypatch: pytest.MonkeyPatch, left: None
) -> None:
    if what == "no room":

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    elif what == "no folder":
        monkeypatch.setattr(module, "_FOLDERS", ("/nowhere",))
    else:
        mapped = module._mapped
        calls: list[int] = []

        def of_another(path: str, size: int, token: str) -> Any:
            calls.append(1)
            return mapped(path, size, token if len(calls) % 2 else "0" * len(token))

        monkeypatch.setattr(module, "_mapped", of_another)

    assert sums(3000, shared=True) == [(False, [3000, 6000])] * 2


@HERE
def test_no_file_stays_when_a_process_is_killed(left: None) -> None:
    """The file has no name any more when the first packet is written."""
    script = """
import os, signal
from ortflex_core import Peers, run_ranks
from ortflex_core.training.engines.mailbox import Mailbox

def job(group):
    box = Mailbox(Peers(group.join()), 1 << 20, shared=True)
    assert box.shared
    box.packets[0][:] = 1
    box.exchange("test")
    os.kill(os.getpid(), signal.SIGKILL)

run_ranks(2, job)
"""
    done = children.run([sys.executable, "-c", script])
    assert done.returncode == -9


def test_small_packets_are_in_the_frame() -> None:
    assert sums(100) == [(False, [100, 200])] * 2
