"""The inputs and outputs of a graph of training steps, for batches of one shape, on any runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Batch,
    Block,
    Device,
    GraphError,
    HostVector,
    Key,
    Losses,
    NoGradientRule,
    NotDifferentiable,
    Port,
    Problem,
    Program,
    TensorSpec,
    Value,
    satisfying,
)

REFUSALS = (NoGradientRule, NotDifferentiable, GraphError)
"""Errors of a problem whose step has no graph."""


check_steps = satisfying(
    "must be 'auto' or an integer >= 1", lambda v: v == "auto" or (type(v) is int and v >= 1)
)
"""The validator of a backend's ``steps_per_run``."""


def fewest_runs(problem: Problem, most: int) -> int:
    """The steps of a run, ``most`` at most, with which an epoch of known length has the fewest runs."""
    whole = (problem.epoch_steps or 0) // problem.updating.accumulate
    # An epoch is whole // k runs of k steps, and whole % k of one.
    return min(range(1, most + 1), key=lambda k: (whole // k + whole % k, k))


def split(batches: Sequence[Batch], steps: int, size: int) -> Iterator[Sequence[Batch]]:
    """The batches of each of ``steps`` steps: ``size`` of them, the last step may have fewer."""
    for k in range(steps):
        yield [batches[j] for j in range(k * size, min((k + 1) * size, len(batches)))]


class StepPlan:
    """A program of steps with the memory of its data and host scalars.

    Attributes:
        batches: the number of batches of all steps.
        parts: the number of batches of a step.
        data: for every column its name, memory for the rows of all steps, an array, and whether the
            array is copied to the memory.
        places: of every port of a column: its exact shape and type, its column's place in ``data``,
            and its own number among the batches.
        costs: the outputs that are costs.
        totals: the positions of the Σ w·l of each batch and term among them, [steps, batches ·
            terms].
        penalties: the positions of the penalty of each step.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        columns: Sequence[TensorSpec],
        program: Program,
        batch: Batch | Block,
        steps: int,
    ) -> None:
        self.problem = problem
        self.program = program
        self.steps = steps
        self.hosts = HostVector(program, device, problem.constants())
        count = problem.updating.accumulate
        batches = [(step, part) for step in range(steps) for part in range(count)]
        self.symbols = Symbols(problem, steps)
        ports = problem.column_ports
        self.batches, self.parts = len(batches), count
        self.data: list[tuple[str, Value, Array, bool]] = []
        self.places: dict[Key, tuple[TensorSpec, int, int]] = {}
        for spec in columns:
            if ports[spec.name] not in program.takes:
                continue
            shape = batch.shape(spec.name)
            rows = (len(batches) * shape[0], *shape[1:])
            value = device.empty(rows, spec.numpy)
            view = device.view(value)
            staged = np.empty(rows, spec.numpy) if view is None else view
            for k, (step, part) in enumerate(batches):
                port = attrs.evolve(ports[spec.name], step=step, batch=part)
                exact = attrs.evolve(program.takes[port], shape=shape)
                self.places[port] = (exact, len(self.data), k)
            self.data.append((spec.name, value, staged, view is None))
        self.costs = {
            key: spec
            for key, spec in program.gives.items()
            if isinstance(key, Port) and key.role in ("loss", "penalty")
        }
        index = {key: k for k, key in enumerate(self.costs)}
        self.totals = np.array(
            [
                [
                    index[term.at(step, part, None).total_port]
                    for part in range(count)
                    for term in problem.terms
                ]
                for step in range(steps)
            ]
        )
        penalties = [Port("penalty", step=step) for step in range(steps)]
        self.penalties = [index[port] for port in penalties if port in index]
        self.only = self.totals.item() if self.totals.size == 1 and not self.penalties else None
        """The place of the total, if it is the only cost."""
        self.counts_steps = not self.symbols.counted.isdisjoint(self.hosts.varying)
        self._rates: Sequence[float] | None = None
        self._denominators: Sequence[Sequence[float]] | None = None
        self.values: dict[str, float] = {}
        self.factors: Array = np.zeros(self.totals.shape)

    def fill(self, device: Device, batches: Batch | Block) -> None:
        """Copy the rows of all steps into the memory that the graph reads."""
        for name, value, staged, copied in self.data:
            batches.copy(name, staged)
            if copied:
                device.write(value, staged)

    def set_hosts(
        self, done: int, denominators: Sequence[Sequence[float]], rates: Sequence[float]
    ) -> bool:
        """Set the host scalars after ``done`` steps; returns whether they changed.

        Full batches of unweighted data share their denominators, and a constant rate its list.
        """
        if not self.counts_steps and self._rates is rates and self._denominators == denominators:
            return False
        values, symbols = self.values, self.symbols
        if self._denominators != denominators:
            known = iter(denominators)
            factors = []
            for parts in symbols.scales:
                of_batches = zip(*(next(known) for _ in parts), strict=True)
                of_step = list(self.problem.scales(list(map(sum, of_batches))).values())
                for part in parts:
                    values.update(zip(part, of_step, strict=True))
                factors.append(of_step * len(parts))
            self.factors = np.array(factors)
            self._denominators = denominators
        values.update(zip(symbols.rates, rates, strict=True))
        if self.counts_steps:
            draw = done * self.problem.updating.accumulate
            values.update(
                zip(symbols.draws, range(draw + 1, draw + 1 + len(symbols.draws)), strict=True)
            )
            values.update(
                zip(symbols.counters, range(done + 1, done + 1 + self.steps), strict=True)
            )
        self._rates = rates
        self.hosts.update(values)
        return True


class Symbols:
    """The host symbols of every step of a graph, and of every batch of it."""

    def __init__(self, problem: Problem, steps: int) -> None:
        batches = range(problem.updating.accumulate)
        self.rates = [Port("rate", step=k).label for k in range(steps)]
        self.counters = [Port("counter", step=k).label for k in range(steps)]
        self.draws = [Port("draw", step=k, batch=j).label for k in range(steps) for j in batches]
        self.scales = [
            [[term.at(k, j, None).scale_symbol for term in problem.terms] for j in batches]
            for k in range(steps)
        ]
        self.counted = {*self.counters, *self.draws}


class RunLosses:
    """The totals of one run's steps; they are scaled when they are read."""

    __slots__ = ("_costs", "_factors", "_plan")

    def __init__(self, plan: StepPlan, costs: Array) -> None:
        self._plan = plan
        self._costs = costs
        self._factors = plan.factors

    def read(self) -> list[tuple[float, ...]]:
        """(loss, penalty) per step, then each of several losses."""
        plan, costs = self._plan, self._costs
        if plan.only is not None:
            return [(costs.item(plan.only) * self._factors.item(), 0.0)]
        if plan.steps == 1:  # a hook may wait for this, and arrays are slow for a few numbers
            pairs = zip(plan.totals[0].tolist(), self._factors[0].tolist(), strict=True)
            parts = [costs.item(k) * factor for k, factor in pairs]
            count = len(parts) // plan.parts
            loss = sum(sum(parts[k : k + count]) for k in range(0, len(parts), count))
            each = [sum(parts[k::count]) for k in range(count)] if count > 1 else ()
            return [(loss, costs.item(plan.penalties[0]) if plan.penalties else 0.0, *each)]
        # The terms of a batch are added first, in order, as if every batch had a graph of its own.
        products = (costs[plan.totals] * self._factors).reshape(plan.steps, plan.parts, -1)
        losses = products.cumsum(axis=2)[..., -1].cumsum(axis=1)[:, -1].tolist()
        penalties = costs[plan.penalties].tolist() if plan.penalties else [0.0] * plan.steps
        if products.shape[2] == 1:
            return list(zip(losses, penalties, strict=True))
        each = products.cumsum(axis=1)[:, -1].T.tolist()
        return list(zip(losses, penalties, *each, strict=True))


class SeveralRuns:
    """The losses of several runs."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Losses]) -> None:
        self._parts = parts

    def read(self) -> list[tuple[float, ...]]:
        return [costs for part in self._parts for costs in part.read()]
