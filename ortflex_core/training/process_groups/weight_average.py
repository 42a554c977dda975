"""The mean of the weights of processes that train separately for some steps (``sync_every``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ortflex_core.kernel.types import Array
from ortflex_core.training.process_groups.gradient_sum import arrays_in, places_of
from ortflex_core.training.process_groups.peers import Peers


def average_state(
    peers: Peers, state: Mapping[str, Array], costs: Sequence[tuple[float, ...]]
) -> tuple[dict[str, Array], list[list[tuple[float, ...]]]]:
    """Means of arrays over the processes, with equal bits in all of them; and the costs of each process.

    The mean of a tensor is ((a₀ + a₁) + a₂) … / N over the N processes in the order of their ranks,
    computed in float64 and rounded once to the tensor's type. Integers and booleans, such as the number
    of steps, are copied from rank 0.
    """
    table = np.asarray(costs, np.float64)
    places, end = places_of(state, table.nbytes)
    packet = np.zeros(end, np.uint8)
    packet[: table.nbytes].view(np.float64)[:] = table.ravel()
    for name, array in arrays_in(packet, places).items():
        np.copyto(array, state[name])
    parts = peers.gather("average", packet)
    tables = [part[: table.nbytes].view(np.float64).reshape(table.shape) for part in parts]
    states = [arrays_in(part, places) for part in parts]
    means = {name: _mean([arrays[name] for arrays in states]) for name in state}
    return means, [[tuple(map(float, row)) for row in of_rank] for of_rank in tables]


def _mean(arrays: Sequence[Array]) -> Array:
    if arrays[0].dtype.kind != "f":
        return arrays[0].copy()
    total = arrays[0].astype(np.float64)
    for array in arrays[1:]:
        total += array
    total /= len(arrays)
    return total.astype(arrays[0].dtype)
