"""The batches of several processes, and the data that cannot be divided among them."""

from __future__ import annotations

from typing import Any

from ortflex_core.kernel.batches import Batch, Source
from ortflex_core.kernel.errors import Unsupported
from ortflex_core.training.data.iterables import IterableBatches
from ortflex_core.training.process_groups.peers import Peers


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
