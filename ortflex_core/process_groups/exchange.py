"""The gradients of all processes, added up in the order of the batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from ortflex_core.process_groups.peers import Peers
from ortflex_core.types import Array

_ALIGNED = 64


class GradientExchange:
    """Sums of gradients over the batches of a step, which several processes compute.

    Batch number k of a step is that of rank k mod size. One packet has a batch's gradients and the
    costs that belong to it. ``own`` are the arrays that this process writes its gradients to, by
    parameter; ``costs`` the float64 numbers that travel with them; ``sums`` what :meth:`add` makes.

    The running statistics of BatchNormalization travel, too: ``shares`` are (1 − momentum) · batch of this
    process's batch, by the number of the move, and every process moves its ``statistics`` by those of all
    batches in their order: statistics ← momentum · statistics + share.

    Args:
        peers: the processes.
        like: an array of the shape and type of each gradient.
        costs: how many numbers travel with them.
        statistics: the running statistics.
        moves: the statistic and the momentum of each move by a batch, in their order.
    """

    def __init__(
        self,
        peers: Peers,
        like: Mapping[str, Array],
        costs: int,
        statistics: Mapping[str, Array] | None = None,
        moves: Sequence[tuple[str, float]] = (),
    ) -> None:
        self.peers = peers
        self.statistics = {name: array.copy() for name, array in (statistics or {}).items()}
        self._moves = moves
        end = 8 * costs
        self._places, end = places_of(like, end)
        moved = {k: self.statistics[name] for k, (name, _) in enumerate(moves)}
        self._shared, end = places_of(moved, end)
        self._packet = np.zeros(end, np.uint8)
        self._costs = costs
        self.costs = self._packet[: 8 * costs].view(np.float64)
        self.own = arrays_in(self._packet, self._places)
        self.shares = arrays_in(self._packet, self._shared)
        self.sums = {name: np.zeros(a.shape, a.dtype) for name, a in like.items()}

    def add(self, first: int, present: int) -> list[list[float]]:
        """Add the gradients of one batch of each process; their costs, in the same order.

        Args:
            first: the number of rank 0's batch in the step; at 0 a new sum begins.
            present: how many processes have a batch: the last step of an epoch may end early.
        """
        costs = []
        for rank, part in enumerate(self.peers.gather("step", self._packet)[:present]):
            for name, gradient in arrays_in(part, self._places).items():
                total = self.sums[name]
                if first + rank == 0:
                    np.copyto(total, gradient)
                else:
                    np.add(total, gradient, out=total)
            for k, share in arrays_in(part, self._shared).items():
                name, momentum = self._moves[k]
                moved = self.statistics[name]
                moved *= moved.dtype.type(momentum)
                moved += share
            costs.append(part[: 8 * self._costs].view(np.float64).tolist())
        return costs


Name = TypeVar("Name", str, int)
Places = Mapping[Name, tuple[int, Array]]


def places_of(like: Mapping[Name, Array], end: int) -> tuple[Places[Name], int]:
    """Where in a packet arrays begin that come after its first bytes, and where they end."""
    out: dict[Name, tuple[int, Array]] = {}
    for name, array in like.items():
        start = -(-end // _ALIGNED) * _ALIGNED
        out[name] = start, array
        end = start + array.nbytes
    return out, end


def arrays_in(packet: Array, places: Places[Name]) -> dict[Name, Array]:
    """The arrays in a packet, without a copy."""
    return {
        name: packet[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
        for name, (start, like) in places.items()
    }
