"""The sum of the gradients of all processes, in the order of the batches.

The denominators of the losses are added as well; ``Problem.scales`` makes the sum a mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import attrs
import numpy as np

from ortflex_core.kernel.types import Array
from ortflex_core.training.engines.mailbox import Mailbox
from ortflex_core.training.engines.peers import Peers

_ALIGNED = 64


class GradientExchange:
    """Sums of gradients over the batches of a step, which several processes compute.

    Batch number k of a step belongs to rank k mod size. One packet has the gradients of a batch and
    its costs. The process writes its gradients to the arrays in ``own``, by parameter, and float64
    numbers that are sent with them to ``costs``; both are different arrays after each :meth:`add`.
    ``sums`` is the result of :meth:`add`; it may be replaced by other arrays of the same shapes.
    The running statistics of BatchNormalization are exchanged, too: ``shares`` has (1 − momentum) ·
    statistic of this process's batch, by the number of the update, and every process updates its
    ``statistics`` with the shares of all batches in their order: statistics ← momentum · statistics
    + share.

    Args:
        peers: the processes.
        like: an array of the shape and type of each gradient.
        costs: the number of costs that are sent with the gradients.
        statistics: the running statistics.
        moves: the statistic and the momentum of each update by a batch, in their order.
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
        moved = {k: self.statistics[name] for k, (name, _) in enumerate(moves)}
        places, end = places_of(like, 8 * costs)
        shared, end = places_of(moved, end)
        self._split, self._size = _Split(costs, places, shared), end
        self._known: dict[int, Part] = {}
        self._mailbox: Mailbox | None = None
        self._parts: list[Part] = []
        self.sums: Mapping[str, Array] = {n: np.zeros(a.shape, a.dtype) for n, a in like.items()}

    @property
    def mailbox(self) -> Mailbox:
        """The packets, created at the first step, after the processes have compared their facts."""
        # Not a cached_property: before Python 3.12 all instances share its lock, so that ranks in
        # threads would wait for one another here.
        if self._mailbox is None:
            self._mailbox = Mailbox(self.peers, self._size)
        return self._mailbox

    @property
    def _mine(self) -> list[Part]:
        if not self._parts:
            self._parts = [self._split.of(packet) for packet in self.mailbox.packets]
        return self._parts

    @property
    def costs(self) -> Array:
        """The numbers of the next packet."""
        return self._mine[self.mailbox.turn].costs

    @property
    def own(self) -> Mapping[str, Array]:
        """The gradients of the next packet, by parameter."""
        return self._mine[self.mailbox.turn].gradients

    @property
    def shares(self) -> Mapping[int, Array]:
        """The contribution of this process's batch to running statistics."""
        return self._mine[self.mailbox.turn].shares

    def add(self, first: int, present: int) -> list[list[float]]:
        """Add the gradients of one batch of each process; their costs, in the same order.

        Args:
            first: the number of rank 0's batch in the step; at 0 a new sum begins.
            present: how many processes have a batch: the last step of an epoch may end early.
        """
        parts = [self._part(packet) for packet in self.mailbox.exchange("step")[:present]]
        for name, total in self.sums.items():
            gradients = [part.gradients[name] for part in parts]
            if first:
                gradients.insert(0, total)
            if len(gradients) == 1:
                np.copyto(total, gradients[0])
                continue
            np.add(gradients[0], gradients[1], out=total)
            for gradient in gradients[2:]:
                np.add(total, gradient, out=total)
        for part in parts:
            for k, share in part.shares.items():
                name, momentum = self._moves[k]
                moved = self.statistics[name]
                moved *= moved.dtype.type(momentum)
                moved += share
        return [part.costs.tolist() for part in parts]

    def _part(self, packet: Array) -> Part:
        """The arrays in a packet; cached for memory that does not change."""
        if not self.mailbox.shared:
            return self._split.of(packet)
        address = packet.ctypes.data
        if address not in self._known:
            self._known[address] = self._split.of(packet)
        return self._known[address]


@attrs.frozen
class Part:
    """The content of a process's packet."""

    costs: Array
    gradients: Mapping[str, Array]
    shares: Mapping[int, Array]


@attrs.frozen
class _Split:
    """The positions of costs, gradients and shares in a packet."""

    costs: int
    gradients: Places[str]
    shares: Places[int]

    def of(self, packet: Array) -> Part:
        """The arrays in a packet, without a copy."""
        costs = packet[: 8 * self.costs].view(np.float64)
        return Part(costs, arrays_in(packet, self.gradients), arrays_in(packet, self.shares))


Name = TypeVar("Name", str, int)
Places = Mapping[Name, tuple[int, Array]]


def places_of(like: Mapping[Name, Array], end: int) -> tuple[Places[Name], int]:
    """The first byte of each array in a packet, and the end of the last; they start after ``end``."""
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
