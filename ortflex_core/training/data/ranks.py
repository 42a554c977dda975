"""Batches in several processes, each of which reads only its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import attrs

from ortflex_core.kernel.batches import Batch, Epoch, Source
from ortflex_core.kernel.errors import DataError, Unsupported
from ortflex_core.training.data.iterables import IterableBatches
from ortflex_core.training.engines.peers import Peers

_log = logging.getLogger("ortflex")


class RankBatches:
    """The steps of all processes, from the batches that each of them reads.

    Batch number k of a step belongs to rank k mod N. Before a step the processes exchange only the
    numbers of rows of their batches and their denominators. An epoch ends with the first process
    that has no batch left. All other calls go to the source of this process.
    """

    def __init__(
        self, own: Source, peers: Peers, together: int, steps: int | None, rows: int | None
    ) -> None:
        self._own, self._peers = own, peers
        self._each = together // peers.size
        self.steps, self.rows = steps, rows
        self._warned = False
        self.alter: Callable[[Batch, int, int], Batch] | None = None
        """Changes a batch of this process before its step, given the epoch and the batch number."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def position(self) -> dict[str, Any]:
        """The position of this process; the other processes are at the same batch number."""
        return {**self._own.position(), "ranks": self._peers.size}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Continue from the position of rank 0."""
        was, size = position.get("ranks", 1), self._peers.size
        if position.get("kind") == "batches" and was != size:
            raise DataError(
                f"the interrupted run had batches from {was} processes, but there are now {size}, "
                f"so the batches would differ; start {was} processes"
            )
        # The checksum belongs to the batch of rank 0.
        others = {k: v for k, v in position.items() if k != "check"}
        self._own.resume(others if self._peers.rank else position)

    def batches(self, epoch: Epoch) -> Iterator[Sequence[Batch]]:
        """The batches of an epoch, step by step."""
        size = self._peers.size
        start = epoch.start
        drawn = self._own.batches(attrs.evolve(epoch, at_once=1, start=start // size))
        with closing(drawn):  # type: ignore[type-var]  # generators, all of them
            own = (batch for group in drawn for batch in group)
            while True:
                mine = list(islice(own, self._each))
                if self.alter is not None:
                    first = start + self._peers.rank
                    mine = [
                        self.alter(batch, epoch.number, first + k * size)
                        for k, batch in enumerate(mine)
                    ]
                step = self._step(mine)
                start += len(step)
                if step:
                    yield step
                if len(step) < size * self._each:
                    for _ in own:  # so that the next epoch starts a new pass
                        pass
                    return

    def _step(self, mine: Sequence[Batch]) -> list[Batch]:
        """The batches of all processes, up to the first that is missing."""
        facts = [[batch.size, *batch.denominators] for batch in mine]
        given = self._peers.values("batches", facts)
        out: list[Batch] = []
        for k in range(self._each):
            for rank, batches in enumerate(given):
                if k >= len(batches):
                    self._warn_of_unused(sum(map(len, given)) - len(out))
                    return out
                rows, *denominators = batches[k]
                columns = mine[0].columns if mine else {}
                other = Batch(columns, None, rows, denominators)
                out.append(mine[k] if rank == self._peers.rank else other)
        return out

    def _warn_of_unused(self, left: int) -> None:
        if left and not self._warned and not self._peers.rank:
            self._warned = True
            _log.warning(
                "the processes have different numbers of batches: an epoch ends when the first "
                "process has no batch left, so at least %d batches of the other processes are "
                "not used",
                left,
            )


def check_source(given: Any) -> None:
    """Refuse data that do not define which rows each process computes."""
    if isinstance(given, IterableBatches) and not given.of_ranks:
        raise Unsupported(
            "distributed=: an iterable of batches does not define which batches each process "
            "computes; pass a function that has rank and size among its arguments and returns "
            "the batches of that process, or arrays, or a data source that reads a file or folder"
        )


def check_rows(peers: Peers, source: Source) -> None:
    """Refuse fewer rows than processes."""
    if source.rows is not None and source.rows < peers.size:
        raise Unsupported(
            f"{source.rows} rows cannot be divided among {peers.size} processes; start at most as many "
            "processes as there are rows"
        )


def batches_of_all(peers: Peers, own: Batch) -> list[Batch]:
    """A batch of every process by rank; of other processes only size and denominators are known."""
    sizes = peers.values("batch", [own.size, *own.denominators])
    batches = [Batch(own.columns, None, size, denominators) for size, *denominators in sizes]
    batches[peers.rank] = own
    return batches
