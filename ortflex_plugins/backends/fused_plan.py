"""A graph of training steps with its bindings, for batches of one shape; its data, and its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ortflex_core import (
    Array,
    Batch,
    Binder,
    Block,
    Device,
    GraphError,
    Lasting,
    Port,
    Program,
    TensorSpec,
    Trace,
    Value,
    Workspace,
    build,
    get_session,
)
from ortflex_plugins.backends.step_plan import RunLosses, StepPlan

if TYPE_CHECKING:
    from ortflex_plugins.backends.fused import FusedEngine


_PAGE = 256
"""The number of runs whose costs stay on a device together; the loop reads them at this interval."""
_NOTHING = np.empty(0)


_OPSETS = {"": 13}


class Resident:
    """The training columns, copied to the device once if it has room for them."""

    def __init__(self, device: Device, specs: Sequence[TensorSpec]) -> None:
        self._device = device
        self._names = [spec.name for spec in specs]
        self._columns: Mapping[str, Array] | None = None
        self._values: dict[str, Value] = {}

    def of(self, columns: Mapping[str, Array]) -> Mapping[str, Value]:
        """The columns on the device; empty if the arrays change or exceed the room."""
        if not isinstance(columns, Lasting):
            return {}
        if columns is not self._columns:
            self._values = {}  # before other columns are copied
            own = {name: columns[name] for name in self._names if name in columns}
            if sum(array.nbytes for array in own.values()) <= self._device.room():
                self._values = {name: self._device.put(array) for name, array in own.items()}
            self._columns = columns
        return self._values


class Gathering:
    """Gathers rows of columns on the device into the buffers that a graph reads.

    ``targets`` are the specification and the memory of the gathered rows, by column.
    """

    def __init__(
        self, device: Device, targets: Mapping[str, tuple[TensorSpec, Value]], threads: int
    ) -> None:
        self._device = device
        first = next(iter(targets.values()))[1]
        self._rows = device.empty([first.shape()[0]], np.int64)
        program = _program(targets)
        self._binder = Binder(get_session(program, device, threads), "gather")
        self._binder.input("rows", self._rows)
        for name, (_, value) in targets.items():
            self._binder.output(program.gives[Port("data", of=name)].name, value)
        self._inputs = {n: program.takes[Port("value", of=n)].name for n in targets}

    def take(self, columns: Mapping[str, Value], rows: Array) -> None:
        """Gather the rows with these numbers."""
        for name, called in self._inputs.items():
            self._binder.input(called, columns[name])
        self._device.write(self._rows, rows)
        self._binder.run()


def _program(targets: Mapping[str, tuple[TensorSpec, Value]]) -> Program:
    trace = Trace(_OPSETS)
    rows = trace.input("rows", np.int64, ("taken",))
    taken = {}
    for name, (spec, value) in targets.items():
        column = trace.input(Port("value", of=name), spec.dtype, ("all", *value.shape()[1:]))
        taken[Port("data", of=name)] = trace.op.Gather(column, rows, axis=0)
    return build(trace, taken, name="rows")


class BoundStep(StepPlan):
    """A program and its bindings for batches of one shape, in both directions."""

    def __init__(
        self, engine: FusedEngine, program: Program, batch: Batch | Block, steps: int
    ) -> None:
        device = engine.device
        super().__init__(engine.problem, device, engine.columns, program, batch, steps)
        self.place = device.ort_device()
        self._resident = engine.resident
        self._gathering: Gathering | None = None
        specs = {spec.name: spec for spec in engine.columns}
        far = {name: (specs[name], value) for name, value, _, copied in self.data if copied}
        if far and device.room():
            self._gathering = Gathering(device, far, engine.problem.threads)
        self._graphs = engine.graphs
        # A recording writes to the same memory in every run, so costs are read after each run.
        self._session = engine.graphs.session(program)
        self.page = self._new_page(device)
        self._workspace = Workspace(program, device, engine.problem.threads)
        # More bindings exist only if statistics change with every batch and weights do not.
        both: list[tuple[int, ...]] = [(0, 0, 0), (1, 1, 1)]
        self._binders = {now: self._bind(engine, now) for now in both}

    def binder(self, engine: FusedEngine, now: tuple[int, ...]) -> Binder:
        """The bindings that read the versions ``now`` of weights, slots and statistics."""
        if now not in self._binders:
            self._binders[now] = self._bind(engine, now)
        return self._binders[now]

    def _bind(self, engine: FusedEngine, now: tuple[int, ...]) -> Binder:
        if self._session is None:
            session = get_session(
                self.program,
                engine.device,
                engine.problem.threads,
                stop_spinning=engine.host_updates is not None,
            )
            binder = Binder(session, "step")
        else:
            binder = Binder(self._session, "step", graph=self._graphs.number())
        before, after = engine.versions(now), engine.versions(tuple(1 - k for k in now))
        for key, spec in self.program.takes.items():
            if key in self.places:
                exact, column, k = self.places[key]
                _, owner, staged, _ = self.data[column]
                size = staged.nbytes // self.batches
                binder.input_at(exact, owner, self.place, owner.data_ptr() + k * size)
            else:
                value = before.get(key) or engine.evaluator.frozen_port(key)
                binder.input_at(spec, value, self.place, value.data_ptr())
        binder.hosts(self.hosts)
        for key, spec in self.program.gives.items():
            if key not in self.costs:
                binder.output_at(spec, after[key], self.place, after[key].data_ptr())
        self._workspace.bind(binder)
        self.page.bind(binder, self.place)
        return binder

    def binders(self) -> list[Binder]:
        return list(self._binders.values())

    def fill(self, device: Device, batches: Batch | Block) -> None:
        """Copy the rows of all steps into the buffers that the graph reads."""
        if self._gathering is not None and batches.rows is not None:
            columns = self._resident.of(batches.columns)
            if columns:
                self._gathering.take(columns, batches.rows)
                return
        super().fill(device, batches)

    def run(self, engine: FusedEngine, now: tuple[int, ...]) -> RunLosses:
        """Run the steps from the versions ``now`` of weights, slots and statistics."""
        binder, page = self.binder(engine, now), self.page
        if self._session is not None:
            return self._replay(engine, now, binder)
        if page.view is not None:
            binder.run()
            return RunLosses(self, page.view[0].copy())
        if page.used == page.size:
            page = self.page = self._new_page(engine.device)
        page.bind(binder, self.place)
        binder.run()
        page.used += 1
        return LateLosses(self, page)

    def _replay(self, engine: FusedEngine, now: tuple[int, ...], binder: Binder) -> RunLosses:
        """Run what is recorded; the first run records, and may show that this is not possible."""
        try:
            binder.run()
        except GraphError as error:
            if binder.runs:
                raise
            # The run has read one version of the state and written to the other: it can be repeated.
            self._graphs.refuse(error)
            self._session = None
            self.page = self._new_page(engine.device)
            self._binders = {}
            return self.run(engine, now)
        return RunLosses(self, engine.device.read(self.page.value)[0])

    def _new_page(self, device: Device) -> Page:
        rows = _PAGE if self._session is None else 1
        return Page(device, list(self.costs.values()), rows)


class Page:
    """The costs of runs: of one run in host memory, or of many, which are copied when they are read."""

    def __init__(self, device: Device, costs: Sequence[TensorSpec], rows: int = _PAGE) -> None:
        self._device, self._specs = device, costs
        self.used = 0
        self.value = device.empty([1, len(costs)], costs[0].numpy)
        self.view = device.view(self.value)
        self.size = 1
        if self.view is None:
            self.size = rows
            self.value = device.empty([rows, len(costs)], costs[0].numpy)
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


class LateLosses(RunLosses):
    """Losses that stay on the device until they are read."""

    __slots__ = ("_page", "_row")

    def __init__(self, plan: BoundStep, page: Page) -> None:
        super().__init__(plan, _NOTHING)
        self._page, self._row = page, page.used - 1

    def read(self) -> list[tuple[float, ...]]:
        self._costs = self._page.row(self._row)
        return super().read()
