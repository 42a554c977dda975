"""Communication between processes that train together.

Every message begins with a frame of a fixed size, so a failing process can report the failure
wherever the others wait: it sends such a frame instead of its next message.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import platform
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ortflex_core.kernel.engine_protocols import Communicator
from ortflex_core.kernel.errors import OrtflexError, describe_error
from ortflex_core.kernel.types import Array

_FRAME = 1024
# Whether the process failed, whether it was interrupted, the number of bytes, the place.
_HEAD = struct.Struct("<??Q24s")
_ROOM = _FRAME - _HEAD.size
STATE = "optimizer state"
"""The place where processes put the parts of a divided state together."""
_SAME_CALLS = (
    "every process has to make the same calls of the Trainer (fit, step, find_rate, calibrate)"
)
_SAME_COMMAND = f"start all of them with the same command; {_SAME_CALLS}"
_NEEDS = {
    STATE: "with shard_state, each process has a part of the optimizer's state, so every process has to "
    "call what reads or saves it (save, export_step, pickle and copy), rank 0 alone cannot: every_rank = "
    "True in the class of a callback, or its hook 'settled'"
}
"""What to do if processes meet at different points, by the place of one of them."""


class RankFailed(OrtflexError):
    """Another process failed or ended, so this one ends, too."""


class RanksDiffer(OrtflexError):
    """The processes differ in model, recipe, version or data."""


class Peers:
    """The communication of a process with the others of its group.

    All processes call the same methods in the same order.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes.
        wishes: whether this process was interrupted; it is sent with every message.
        interrupted: whether any process was interrupted before the last message.
        shards: whether the optimizer's state is divided among the processes (``shard_state``).
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.wishes: Callable[[], bool] = bool
        self.interrupted = False
        self.shards = False
        self._ended = False
        self._before = ""
        self._neighbors: int | None = None

    @property
    def neighbors(self) -> int:
        """The processes on this machine, this one included."""
        if self._neighbors is None:
            self._neighbors = self.values("machines", platform.node()).count(platform.node())
        return self._neighbors

    def gather(self, place: str, payload: Array) -> list[Array]:
        """The bytes (uint8, one axis) of each process, by rank; sizes may differ.

        Raises:
            RankFailed: another process failed, ended, did not answer in time, or sent a message of
                another place.
        """
        frame = _frame(place, payload, self.wishes())
        frames = [np.array(f) for f in self._all_gather(frame, place)]
        heads = [_HEAD.unpack(bytes(frame[: _HEAD.size])) for frame in frames]
        self.interrupted = any(head[1] for head in heads)
        sizes = [head[2] for head in heads]
        inside = [f[_HEAD.size :][:n] for f, n in zip(frames, sizes, strict=True)]
        for rank, head in enumerate(heads):
            if head[0]:
                self._ended = True
                text = bytes(inside[rank]).decode("utf-8", "replace")
                raise RankFailed(f"the process of rank {rank} failed: {text}")
        names = [head[3].rstrip(b"\0").decode() for head in heads]
        if len(set(names)) > 1:
            self._ended = True
            other = next(k for k, name in enumerate(names) if name != names[0])
            raise RankFailed(
                "the processes are not at the same point of the training: rank 0 at "
                f"{names[0]!r}, rank {other} at {names[other]!r}; "
                + next((_NEEDS[n] for n in names if n in _NEEDS), _SAME_COMMAND)
            )
        self._before = place
        if max(sizes) <= _ROOM:
            return inside
        padded = payload
        if len(payload) < max(sizes):
            padded = np.zeros(max(sizes), np.uint8)
            padded[: len(payload)] = payload
        parts = self._all_gather(padded, place)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def rounds(self, batches: int) -> Iterator[tuple[int, int | None, int]]:
        """Batches distributed to the processes in turn, round by round.

        Yields the index of the first batch of a round, the index of this process's batch (None if the
        last round has no batch for it), and the number of batches in the round.
        """
        for start in range(0, batches, self.size):
            own, present = start + self.rank, min(self.size, batches - start)
            yield start, own if own < batches else None, present

    def in_turn(
        self, place: str, own: Iterable[Sequence[tuple[str, Array]]]
    ) -> Iterator[list[tuple[str, Array]]]:
        """Named arrays of the batches of all processes in their order, from those of this process.

        Batch k belongs to rank k mod N. The first batch that is missing is the end.
        """
        drawn = iter(own)
        while True:
            mine = next(drawn, ())
            message = [np.array([n for n, _ in mine]), *(a for _, a in mine)] if mine else []
            for part in self.gather(place, pack(message)):
                if not len(part):
                    return
                names, *arrays = unpack(part)
                yield list(zip(names.tolist(), arrays, strict=True))

    def values(self, place: str, value: Any) -> list[Any]:
        """The JSON value of each process, by rank."""
        text = json.dumps(value).encode()
        return [json.loads(bytes(part)) for part in self.gather(place, _bytes(text))]

    def any(self, place: str, flag: bool) -> bool:
        """Whether the argument is true in any process."""
        return any(self.values(place, bool(flag)))

    def agree(self, place: str, facts: Mapping[str, str], hint: str = "") -> None:
        """Check that all processes have the same facts.

        Raises:
            RanksDiffer: the first fact that differs, with two of its values.
        """
        given = self.values(place, dict(facts))
        for rank, other in enumerate(given):
            for name in dict.fromkeys([*given[0], *other]):
                first, own = (g.get(name, "nothing") for g in (given[0], other))
                if first != own:
                    self._ended = True
                    raise RanksDiffer(
                        f"the processes of this training differ in {name}: rank 0 has {first}, rank "
                        f"{rank} has {own}. {hint or 'Start all of them with the same files and versions'}"
                    )

    def agree_on_weights(self, state: Mapping[str, Array], epoch: int) -> None:
        """Check that all processes have the same weights.

        Raises:
            RanksDiffer: they do not.
        """
        self.agree(
            f"weights {epoch + 1}",
            {f"the weight {n!r} after epoch {epoch + 1}": _digest(a) for n, a in state.items()},
            "A callback that changes weights has to run in every process: every_rank = True in its "
            "class; different processors may round differently",
        )

    @contextlib.contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Send an error that is raised inside to the other processes, so that they end, too."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Report the failure of this process in place of its next message, if there is one."""
        if self._ended:
            return
        self._ended = True
        text = _bytes(describe_error(error).encode()[:_ROOM])
        with contextlib.suppress(Exception):
            self._communicator.all_gather(_frame("failed", text, failed=True))

    def _all_gather(self, array: Array, place: str) -> list[Array]:
        if self._ended:
            raise RankFailed(
                "the processes of this training were separated by an error; start the training again"
            )
        try:
            return list(self._communicator.all_gather(array))
        except (KeyboardInterrupt, OrtflexError):
            raise
        except TimeoutError as error:
            self._ended = True
            raise RankFailed(self._silence(place, describe_error(error))) from error
        except Exception as error:
            self._ended = True
            raise RankFailed(
                "another process of the training has ended; its messages show the reason "
                f"({describe_error(error)}). Rank {self.rank} waited for its message {place!r}; if it "
                f"shows no error: {_NEEDS.get(place, _SAME_CALLS)}"
            ) from error

    def _silence(self, place: str, why: str) -> str:
        """The message about a process that sent nothing in time; it need not have ended."""
        others = [str(rank) for rank in range(self.size) if rank != self.rank]
        who = f"the process of rank {others[0]}"
        if len(others) > 1:
            who = f"one of the processes of the ranks {', '.join(others)}"
        last = f"the last message that it sent was {self._before!r}" if self._before else ""
        return (
            f"{who} did not answer in time ({why}): rank {self.rank} waits for its message {place!r}; "
            f"{last or 'it has sent no message yet'}. It may still be running: a callback, a data source "
            "or the computer may be slow or suspended. If it needs that time, set a longer timeout "
            f"of the process group. If it makes no such call: {_NEEDS.get(place, _SAME_CALLS)}"
        )


def _frame(place: str, payload: Array, wish: bool = False, *, failed: bool = False) -> Array:
    """A frame, including the payload if that is small."""
    head = _HEAD.pack(failed, wish, len(payload), place.encode()[:24])
    inside = bytes(payload) if len(payload) <= _ROOM else b""
    return _bytes((head + inside).ljust(_FRAME, b"\0"))


def _digest(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def pack(arrays: Iterable[Array]) -> Array:
    """Arrays as one message.

    >>> [a.tolist() for a in unpack(pack([np.ones(2), np.array(3)]))]
    [[1.0, 1.0], 3]
    """
    out = io.BytesIO()
    for array in arrays:
        np.save(out, array, allow_pickle=False)
    return _bytes(out.getvalue())


def unpack(message: Array) -> list[Array]:
    """The arrays of a message."""
    data, out = io.BytesIO(bytes(message)), []
    while data.tell() < len(message):
        out.append(np.load(data, allow_pickle=False))
    return out


def _bytes(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)
