"""Process groups: several processes that train one model."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import attrs

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.types import Array


class Communicator(Protocol):
    """The connection of a process to its group.

    ``rank`` counts from 0, ``size`` is the number of processes. A group needs only this one
    operation; the core builds the others from it, and computes sums itself, in the order of the ranks.
    """

    rank: int
    size: int

    def all_gather(self, array: Array) -> Sequence[Array]:
        """The arrays of all processes, by rank; every process passes one of the same size.

        ``array`` has one axis and the type uint8. It returns when all processes have called it, and
        raises an error if another process has ended, and a TimeoutError, whose text has the seconds,
        if another one has not called it in time. The next call may reuse the memory of the arrays.
        """

    def close(self) -> None:
        """Leave the group."""


@attrs.frozen(kw_only=True)
class ProcessGroup(Component, abc.ABC):
    """A process group lets the processes of a distributed run exchange data, for example through MPI."""

    launch: ClassVar[str] = ""
    """The first part of a command that starts four processes, for messages."""

    @classmethod
    @abc.abstractmethod
    def unavailable(cls, environ: Mapping[str, str]) -> list[str]:
        """The reasons why this process is not in such a group, each a sentence; empty if it is.

        ``environ`` has the variables that a launcher sets.
        """

    @abc.abstractmethod
    def join(self) -> Communicator:
        """Join the group of this process; a second call returns the same rank.

        Raises:
            OrtflexError: it cannot be joined, or the other processes did not join.
        """
