"""A graph of training steps with its bindings, for batches of one shape; and the losses of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from ortflex_core.data import Batch, Block
from ortflex_core.graph import Key, Port, Program
from ortflex_core.problem import Problem
from ortflex_core.protocols import Device, Value
from ortflex_core.runtime import Binder, HostVector, get_session
from ortflex_core.types import Array, TensorSpec
from ortflex_plugins.backends.resident import Gathering

if TYPE_CHECKING:
    from ortflex_plugins.backends.fused import FusedEngine

_PAGE = 256
"""Runs whose costs stay on a device together; the loop reads them as often."""
_NOTHING = np.empty(0)


class Plan:
    """A program and its bindings for batches of one shape, in both directions."""

    def __init__(
        self, engine: FusedEngine, program: Program, batch: Batch | Block, steps: int
    ) -> None:
        device = engine.device
        self.program = program
        self.steps = steps
        self.hosts = HostVector(program, device, engine.problem.constants())
        self.place = device.ort_device()
        problem = engine.problem
        count = problem.updating.accumulate
        places = [(step, part) for step in range(steps) for part in range(count)]
        self.symbols = Symbols(problem, steps)
        columns = problem.column_ports
        self.data: list[tuple[str, Value, Array, bool]] = []
        self._gathering: Gathering | None = None
        self._resident = engine.resident
        far: dict[str, tuple[TensorSpec, Value]] = {}
        self._known: dict[Key, tuple[TensorSpec, Value, int]] = {}
        for spec in engine.columns:
            if columns[spec.name] not in program.takes:
                continue
            shape = batch.shape(spec.name)
            rows = (len(places) * shape[0], *shape[1:])
            value = device.empty(rows, spec.numpy)
            view = device.view(value)
            staged = np.empty(rows, spec.numpy) if view is None else view
            self.data.append((spec.name, value, staged, view is None))
            if view is None:
                far[spec.name] = (spec, value)
            size = int(np.prod(shape)) * spec.numpy.itemsize
            for k, (step, part) in enumerate(places):
                port = attrs.evolve(columns[spec.name], step=step, batch=part)
                exact = attrs.evolve(program.takes[port], shape=shape)
                self._known[port] = (exact, value, value.data_ptr() + k * size)
        if far and device.room():
            self._gathering = Gathering(device, far, engine.problem.threads)
        self._costs = {
            key: spec
            for key, spec in program.gives.items()
            if isinstance(key, Port) and key.role in ("loss", "penalty")
        }
        self.page = Page(device, list(self._costs.values()))
        index = {key: k for k, key in enumerate(self._costs)}
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
        # Further bindings exist only if statistics change with every batch and weights do not.
        both: list[tuple[int, ...]] = [(0, 0, 0), (1, 1, 1)]
        self._binders = {now: self._bind(engine, now) for now in both}
        self.counts_steps = not self.symbols.counted.isdisjoint(self.hosts.varying)
        self.rates: Sequence[float] | None = None
        self.denominators: Sequence[Sequence[float]] | None = None
        self.values: dict[str, float] = {}
        self.factors: Array = np.zeros(self.totals.shape)

    def binder(self, engine: FusedEngine, now: tuple[int, ...]) -> Binder:
        """The bindings that read the versions ``now`` of weights, slots and statistics."""
        if now not in self._binders:
            self._binders[now] = self._bind(engine, now)
        return self._binders[now]

    def _bind(self, engine: FusedEngine, now: tuple[int, ...]) -> Binder:
        binder = Binder(get_session(self.program, engine.device, engine.problem.threads), "step")
        before, after = engine.versions(now), engine.versions(tuple(1 - k for k in now))
        for key, spec in self.program.takes.items():
            if key in self._known:
                exact, owner, pointer = self._known[key]
                binder.input_at(exact, owner, self.place, pointer)
            else:
                value = before.get(key) or engine.evaluator.frozen_port(key)
                binder.input_at(spec, value, self.place, value.data_ptr())
        binder.hosts(self.hosts)
        for key, spec in self.program.gives.items():
            if key not in self._costs:
                binder.output_at(spec, after[key], self.place, after[key].data_ptr())
        self.page.bind(binder, self.place)
        return binder

    def binders(self) -> list[Binder]:
        """All bindings."""
        return list(self._binders.values())

    def fill(self, device: Device, batches: Batch | Block) -> None:
        """Copy the rows of all steps into the buffers that the graph reads."""
        if self._gathering is not None and batches.rows is not None:
            columns = self._resident.of(batches.columns)
            if columns:
                self._gathering.take(columns, batches.rows)
                return
        for name, value, staged, copied in self.data:
            batches.copy(name, staged)
            if copied:
                device.write(value, staged)

    def run(self, engine: FusedEngine, now: tuple[int, ...]) -> RunLosses:
        """Run the steps from the versions ``now`` of weights, slots and statistics."""
        binder, page = self.binder(engine, now), self.page
        if page.view is not None:
            binder.run()
            return RunLosses(self, page.view[0].copy())
        if page.used == page.size:
            page = self.page = Page(engine.device, list(self._costs.values()))
        page.bind(binder, self.place)
        binder.run()
        page.used += 1
        return LateLosses(self, page)


class Symbols:
    """The host symbols of every step of a graph, and of every batch of it."""

    def __init__(self, problem: Problem, steps: int) -> None:
        batches = range(problem.updating.accumulate)
        self.rates = [Port("rate", step=k).label for k in range(steps)]
        self.counters = [Port("counter", step=k).label for k in range(steps)]
        self.draws = [[Port("draw", step=k, batch=j).label for j in batches] for k in range(steps)]
        self.scales = [
            [[term.at(k, j, None).scale_symbol for term in problem.terms] for j in batches]
            for k in range(steps)
        ]
        self.counted = {*self.counters, *(symbol for own in self.draws for symbol in own)}


class Page:
    """The costs of runs: of one run in host memory, else of many, which are copied when they are read."""

    def __init__(self, device: Device, costs: Sequence[TensorSpec]) -> None:
        self._device, self._specs = device, costs
        self.used = 0
        self.value = device.empty([1, len(costs)], costs[0].numpy)
        self.view = device.view(self.value)
        self.size = 1
        if self.view is None:
            self.size = _PAGE
            self.value = device.empty([_PAGE, len(costs)], costs[0].numpy)
        self._known = 0
        self._read: Array = np.empty(0)

    def bind(self, binder: Binder, place: Any) -> None:
        """Bind the costs of the next run to the next free row."""
        item = self._specs[0].numpy.itemsize
        first = self.value.data_ptr() + self.used * len(self._specs) * item
        for k, spec in enumerate(self._specs):
            binder.output_at(spec, self.value, place, first + k * item)

    def row(self, k: int) -> Array:
        """The costs of the k-th run."""
        if k >= self._known:
            self._read, self._known = self._device.read(self.value), self.used
        costs: Array = self._read[k]
        return costs


class RunLosses:
    """The totals of one run's steps; they are scaled when they are read."""

    __slots__ = ("_costs", "_factors", "_plan")

    def __init__(self, plan: Plan, costs: Array) -> None:
        self._plan = plan
        self._costs = costs
        self._factors = plan.factors

    def read(self) -> list[tuple[float, float]]:
        """(loss, penalty) per step."""
        plan, costs = self._plan, self._costs
        if plan.steps == 1:  # a hook may wait for it, and arrays are slow for a few numbers
            pairs = zip(plan.totals[0].tolist(), self._factors[0].tolist(), strict=True)
            loss = sum(costs.item(k) * factor for k, factor in pairs)
            return [(loss, costs.item(plan.penalties[0]) if plan.penalties else 0.0)]
        losses = (costs[plan.totals] * self._factors).sum(axis=1).tolist()
        if not plan.penalties:
            return [(loss, 0.0) for loss in losses]
        return list(zip(losses, costs[plan.penalties].tolist(), strict=True))


class LateLosses(RunLosses):
    """Losses that stay on the device until they are read."""

    __slots__ = ("_page", "_row")

    def __init__(self, plan: Plan, page: Page) -> None:
        super().__init__(plan, _NOTHING)
        self._page, self._row = page, page.used - 1

    def read(self) -> list[tuple[float, float]]:
        """(loss, penalty) per step."""
        self._costs = self._page.row(self._row)
        return super().read()


class SeveralRuns:
    """The losses of several runs."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[RunLosses]) -> None:
        self._parts = parts

    def read(self) -> list[tuple[float, float]]:
        """(loss, penalty) per step."""
        return [pair for part in self._parts for pair in part.read()]
