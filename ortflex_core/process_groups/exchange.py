"""The gradients of all processes, added up in the order of the batches."""

from __future__ import annotations

from collections.abc import Mapping

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
    process's batch, and every process moves its ``statistics`` by those of all batches in their order:
    statistics ← momentum · statistics + share.

    Args:
        peers: the processes.
        like: an array of the shape and type of each gradient.
        costs: how many numbers travel with them.
        statistics: the running statistics.
        momenta: the momentum of each of them.
    """

    def __init__(
        self,
        peers: Peers,
        like: Mapping[str, Array],
        costs: int,
        statistics: Mapping[str, Array] | None = None,
        momenta: Mapping[str, float] | None = None,
    ) -> None:
        self.peers = peers
        self.statistics = {name: array.copy() for name, array in (statistics or {}).items()}
        self._momenta = momenta or {}
        end = 8 * costs
        self._places, end = places_of(like, end)
        self._shared, end = places_of(self.statistics, end)
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
            for name, share in arrays_in(part, self._shared).items():
                moved = self.statistics[name]
                moved *= moved.dtype.type(self._momenta[name])
                moved += share
            costs.append(part[: 8 * self._costs].view(np.float64).tolist())
        return costs


Places = Mapping[str, tuple[int, Array]]


def places_of(like: Mapping[str, Array], end: int) -> tuple[Places, int]:
    """Where in a packet arrays begin that come after its first bytes, and where they end."""
    out: dict[str, tuple[int, Array]] = {}
    for name, array in like.items():
        start = -(-end // _ALIGNED) * _ALIGNED
        out[name] = start, array
        end = start + array.nbytes
    return out, end


def arrays_in(packet: Array, places: Places) -> dict[str, Array]:
    """The arrays in a packet, without a copy."""
    return {
        name: packet[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
        for name, (start, like) in places.items()
    }
