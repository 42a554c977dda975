"""A process group of threads, for tests of trainings in several processes without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import attrs
import numpy as np

from ortflex_core import Array, ProcessGroup

T = TypeVar("T")


class _Seat:
    """The communicator of a thread (see :class:`ortflex_core.Communicator`)."""

    def __init__(self, rank: int, given: list[Array], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(given)
        self._given, self._barrier = given, barrier

    def all_gather(self, array: Array) -> list[Array]:
        self._given[self.rank] = array.copy()
        self._barrier.wait()
        received = list(self._given)
        self._barrier.wait()  # before the next message replaces the arrays
        return received

    def close(self) -> None:
        self._barrier.abort()


@attrs.frozen(kw_only=True)
class ThreadGroup(ProcessGroup):
    """One thread of a group; :func:`run_ranks` starts the threads.

    >>> ThreadGroup().join().size
    1
    """

    name: ClassVar[str] = "threads"

    seat: Any = attrs.field(factory=lambda: _Seat(0, [np.zeros(0)], threading.Barrier(1)), eq=id)

    @classmethod
    def unavailable(cls, environ: Mapping[str, str]) -> list[str]:
        """Return no reasons: threads need no launcher."""
        return []

    def join(self) -> Any:
        """Return the communicator of the thread."""
        return self.seat

    def __deepcopy__(self, memo: Any) -> ThreadGroup:
        return self


def run_ranks(
    size: int, job: Callable[[ThreadGroup], T], *, seconds: float = 60.0
) -> list[T | BaseException]:
    """Run ``job`` in ``size`` threads at the same time, each with its rank in one group.

    Returns the result of each thread, or the error that ended it, by rank. A thread waits for the others
    for at most ``seconds``.

    >>> run_ranks(2, lambda group: (group.join().rank, group.join().size))
    [(0, 2), (1, 2)]
    """
    given: list[Array] = [np.zeros(0)] * size
    barrier = threading.Barrier(size, timeout=seconds)
    out: list[Any] = [TimeoutError("the thread did not end")] * size

    def run(rank: int) -> None:
        seat = _Seat(rank, given, barrier)
        try:
            out[rank] = job(ThreadGroup(seat=seat))
        except BaseException as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * seconds)
    return out
