"""Optimizer state that is divided among the processes: each updates its part of the weights (ZeRO-1).

Source: Rajbhandari et al. 2020, ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
the stage P_os.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.engine_protocols import Device, Value
from ortflex_core.kernel.errors import Unsupported
from ortflex_core.kernel.types import Array
from ortflex_core.training.engines.buffers import check_state, read_into
from ortflex_core.training.engines.gradient_sum import arrays_in, places_of
from ortflex_core.training.engines.mailbox import Mailbox
from ortflex_core.training.engines.peers import STATE


def check_shards(problem: Problem) -> None:
    """Refuse what one process cannot update without the state of the others."""
    if problem.updating.average is not None:
        raise Unsupported(
            "shard_state: predictions read the averages of all weights (averaging=), so every process "
            "has to keep them; leave out one of the two"
        )
    for _, members in problem.sharing:
        optimizer = problem.optimizer_of(members[0])
        raise Unsupported(
            f"shard_state: the optimizer {type(optimizer).__name__} has state that all parameters share, "
            "computed from the state of each; use another optimizer, such as adam, or shard_state=False"
        )


def divide(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Names for each rank: the largest first, to the rank with the least so far.

    >>> divide({"a": 5, "b": 3, "c": 3, "d": 1}, 2)
    [['a', 'd'], ['b', 'c']]
    """
    parts: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda n: -sizes[n]):
        least = loads.index(min(loads))
        parts[least].append(name)
        loads[least] += sizes[name]
    return parts


class StateShards:
    """The part of the optimizer's state that a process keeps, and the weights that it updates.

    Whole tensors are divided by their bytes. After an update, :meth:`exchange` sends the weights of
    this process and receives all others.

    Args:
        problem: what is trained, in several processes.

    Attributes:
        own: the parameters that this process updates.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.peers is not None
        self.peers, self._problem = problem.peers, problem
        self._specs = {spec.name: spec for spec in problem.slot_specs.values()}
        of_parameter: dict[str, list[str]] = {n: [] for n in problem.parameters}
        for name, port in problem.slot_ports.items():
            if port.of is not None:
                of_parameter[port.of].append(name)
        weights = problem.model.initializers
        sizes = {
            n: math.prod(problem.shape_of(n)) * np.dtype(weights[n].numpy).itemsize
            + sum(map(self._bytes, slots))
            for n, slots in of_parameter.items()
        }
        parts = divide(sizes, self.peers.size)
        self.own: Collection[str] = frozenset(parts[self.peers.rank])
        self._slots = [[s for n in part for s in of_parameter[n]] for part in parts]
        places, ends = [], [0]
        for part in parts:
            like = {
                n: np.broadcast_to(np.empty((), weights[n].numpy), problem.shape_of(n))
                for n in part
            }
            found, end = places_of(like, 0)
            places.append(found)
            ends.append(end)
        self._places, self._size = places, max(ends)
        self._mailbox: Mailbox | None = None

    def _bytes(self, slot: str) -> int:
        spec = self._specs[slot]
        return math.prod(spec.shape or ()) * np.dtype(spec.numpy).itemsize  # type: ignore[arg-type]

    def keeps(self, port: Port) -> bool:
        """Whether this process keeps a tensor of state; all keep those of no parameter."""
        return port.of is None or port.of in self.own

    def exchange(self, device: Device, weights: Mapping[str, Value]) -> None:
        """Send the weights that this process has updated, and write those of the others."""
        if self._mailbox is None:
            self._mailbox = Mailbox(self.peers, self._size)
        mailbox, rank = self._mailbox, self.peers.rank
        mine = arrays_in(mailbox.packets[mailbox.turn], self._places[rank])
        read_into(device, {n: weights[n] for n in mine}, mine)
        for other, packet in enumerate(mailbox.exchange("weights")):
            if other == rank:
                continue
            for name, array in arrays_in(packet, self._places[other]).items():
                view = device.view(weights[name])
                if view is None:
                    device.write(weights[name], array)
                else:
                    np.copyto(view, array)

    def mine(self, slots: Mapping[str, Array]) -> dict[str, Array]:
        """The tensors of a whole state that this process keeps.

        Raises:
            DataError: an unknown name or another shape.
        """
        shapes = {name: spec.shape or () for name, spec in self._specs.items()}
        check_state(slots, shapes, "optimizer slot")  # type: ignore[arg-type]
        ports = self._problem.slot_ports
        return {name: array for name, array in slots.items() if self.keeps(ports[name])}

    def whole(self, slots: Mapping[str, Array]) -> dict[str, Array]:
        """The state of all processes, from that of this one; every process calls it, or serves."""
        self.peers.values(STATE, "gather")
        found = {**slots, **dict(self._gathered(slots))}
        return {name: found[name] for name in self._specs}

    def serve(self, slots: Mapping[str, Array]) -> None:
        """Send this process's part as often as the process of rank 0 asks for the whole, then return."""
        while self.peers.values(STATE, "serve")[0] == "gather":
            for _ in self._gathered(slots):
                pass

    def release(self) -> None:
        """End :meth:`serve` in the other processes."""
        self.peers.values(STATE, "end")

    def _gathered(self, slots: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """The state of all parameters, one tensor of each process at a time."""
        rank = self.peers.rank
        for round_ in range(max(map(len, self._slots))):
            names: Sequence[str | None] = [
                part[round_] if round_ < len(part) else None for part in self._slots
            ]
            name = names[rank]
            given = np.zeros(0, np.uint8)
            if name is not None:
                given = np.ascontiguousarray(slots[name]).reshape(-1).view(np.uint8)
            for other, packet in zip(names, self.peers.gather(STATE, given), strict=True):
                if other is not None:
                    spec = self._specs[other]
                    shape: Any = spec.shape or ()
                    array = packet.copy().view(spec.numpy).reshape(shape)
                    yield other, array
