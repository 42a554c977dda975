"""Packets that processes exchange at every step, in shared memory if possible."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ortflex_core.kernel.regular_files import open_regular
from ortflex_core.kernel.types import Array
from ortflex_core.training.engines.peers import Peers

_TOKEN = 32
_ALIGNED = 4096
_FOLDERS = ("/dev/shm",)  # files there are in memory; elsewhere the system may write them to a disk


class Mailbox:
    """Packets of equal size that the processes exchange.

    Where all processes run on one machine, the packets are in a file that all of them map into
    their memory: a message is then only a frame, and nothing is copied. Each process has two
    packets, used in turn: one may be written while others still read the previous one.

    Attributes:
        packets: the two packets of this process.
        turn: the packet that the next exchange sends.
    """

    def __init__(self, peers: Peers, size: int, *, shared: bool | None = None) -> None:
        self._peers = peers
        self.turn = 0
        self.packets: list[Array] = [np.zeros(size, np.uint8)] * 2
        self._all: list[list[Array]] = []
        wanted = size > 1000 if shared is None else shared
        if wanted and size and peers.neighbors == peers.size:
            room = -(-size // _ALIGNED) * _ALIGNED
            memory = _common(peers, 2 * peers.size * room)
            if memory is not None:
                for turn in (0, 1):
                    starts = range(turn * room, len(memory), 2 * room)
                    self._all.append([memory[start : start + size] for start in starts])
                self.packets = [self._all[turn][peers.rank] for turn in (0, 1)]

    @property
    def shared(self) -> bool:
        """Whether the packets are in shared memory."""
        return bool(self._all)

    def exchange(self, place: str) -> list[Array]:
        """The packets of all processes by rank; this process sends the one at ``turn``.

        Then ``turn`` switches. The packets do not change until this process calls the next
        exchange; its next packet may be written before that.
        """
        turn = self.turn
        if not self._all:
            return self._peers.gather(place, self.packets[turn])
        self._peers.gather(place, np.zeros(0, np.uint8))
        self.turn = 1 - turn
        return self._all[turn]


def _common(peers: Peers, size: int) -> Array | None:
    """Shared memory of all processes, as bytes; None if that is impossible."""
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(_file(size)) if not peers.rank else None
        given = [path, _token(path)] if path else None
        place = peers.values("memory", given)[0]
        memory = _mapped(place[0], size, place[1]) if place else None
        # The file is unlinked once all processes have opened it, so a killed process leaves no
        # file.
        if peers.any("memory", memory is None):
            return None
    return memory


@contextlib.contextmanager
def _file(size: int) -> Iterator[str | None]:
    """A file of that size with a token at its end, removed afterwards; None if there is no room."""
    folder = next((f for f in _FOLDERS if os.access(f, os.W_OK)), None)
    if folder is None:
        yield None
        return
    number, path = tempfile.mkstemp(prefix="ortflex-", dir=folder)
    try:
        yield path if _filled(number, size) else None
    finally:
        with contextlib.suppress(OSError):
            Path(path).unlink()


def _filled(number: int, size: int) -> bool:
    """Whether there is room; without it, writing to the memory would end the process by a signal."""
    try:
        os.posix_fallocate(number, 0, size + _TOKEN)
        os.pwrite(number, secrets.token_hex(_TOKEN // 2).encode(), size)
    except (OSError, AttributeError):  # not every system has these functions
        return False
    finally:
        os.close(number)
    return True


def _token(path: str) -> str:
    with open_regular(path) as file:
        file.seek(-_TOKEN, os.SEEK_END)
        return file.read().decode()


def _mapped(path: str, size: int, token: str) -> Array | None:
    """The file's memory, if its token matches: several machines may have the same name."""
    try:
        with Path(path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size + _TOKEN)
    except (OSError, ValueError):
        return None
    if memory[size:] != token.encode():
        return None
    return np.frombuffer(memory, np.uint8)[:size]
