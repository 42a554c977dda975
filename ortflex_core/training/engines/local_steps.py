"""Local SGD: every process makes separate steps, and the weights are averaged afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.engine_protocols import Engine
from ortflex_core.kernel.types import Array
from ortflex_core.training.engines.buffers import ReadLosses
from ortflex_core.training.engines.gradient_sum import arrays_in, places_of
from ortflex_core.training.engines.peers import Peers


def of_one_process(problem: Problem, peers: Peers) -> Problem:
    """The problem of a single process: its batches of every step, with separate random masks."""
    seed = problem.seed
    if peers.rank:
        state = np.random.SeedSequence([seed, peers.rank]).generate_state(1, np.uint64)
        seed = int(state[0] >> np.uint64(1))
    updating = attrs.evolve(problem.updating, accumulate=problem.updating.accumulate // peers.size)
    return attrs.evolve(problem, peers=None, updating=updating, seed=seed)


class LocalSteps:
    """An engine that exists in every process and whose state is averaged after every run.

    In each step, batch k belongs to process k mod N, as if gradients were added; but each process
    updates its own weights with the gradients of its own batches. After the last step of a run,
    weights, optimizer state and running statistics are replaced by their means over the processes
    (:func:`~ortflex_core.training.engines.local_steps.average_state`). The costs of a step
    are the means of the costs of the processes, weighted by rows.

    A process without a batch in the last step of an epoch makes no step; its weights enter the mean
    with equal weight.
    """

    steps_per_run = 1

    def __init__(self, engine: Engine, problem: Problem, peers: Peers) -> None:
        self._engine, self._peers = engine, peers
        self._together = problem.updating.accumulate
        self._width = 2 + (len(problem.terms) if len(problem.terms) > 1 else 0)

    def __getattr__(self, name: str) -> Any:
        # Except for the steps, nothing depends on other processes: the state is the same in all of
        # them.
        return getattr(self._engine, name)

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> ReadLosses:
        """The steps of a run, and the mean of the state after them."""
        size = self._together
        steps = [batches[k * size : (k + 1) * size] for k in range(len(rates))]
        own = [step[self._peers.rank :: self._peers.size] for step in steps]
        count = sum(1 for parts in own if parts)  # the last step of an epoch may have none here
        costs: list[tuple[float, ...]] = []
        if count:
            mine = [batch for parts in own for batch in parts]
            costs = list(self._engine.run(mine, rates[:count]).read())
            costs = [(*cost, *[math.nan] * (self._width - len(cost))) for cost in costs]
        costs += [(0.0,) * self._width] * (len(rates) - count)
        return ReadLosses(self._joined(steps, self._synchronize(costs)))

    def _synchronize(self, costs: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
        """Replace the state by its mean; returns the costs of all processes."""
        engine = self._engine
        parts = engine.state(), engine.slots(), engine.buffers()
        named = {(k, name): array for k, part in enumerate(parts) for name, array in part.items()}
        arrays = {f"{k}{n}": a for (k, n), a in named.items()}
        means, all_costs = average_state(self._peers, arrays, costs)
        state, slots, buffers = (
            {n: means[f"{j}{n}"] for j, n in named if j == k} for k in range(len(parts))
        )
        engine.load(state)
        engine.load_slots(slots)
        engine.load_buffers(buffers)
        return all_costs

    def _joined(
        self, steps: Sequence[Sequence[Batch]], costs: Sequence[Sequence[tuple[float, ...]]]
    ) -> list[tuple[float, ...]]:
        """The costs of every step, from the costs of each process."""
        size = self._peers.size
        out = []
        for k, step in enumerate(steps):
            rows = [sum(batch.size for batch in step[rank::size]) for rank in range(size)]
            present = [(n, of_rank[k]) for n, of_rank in zip(rows, costs, strict=True) if n]
            sums = (sum(n * cost[j] for n, cost in present) for j in range(self._width))
            out.append(tuple(total / sum(rows) for total in sums))
        return out


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
