"""The engine of the backend ``xla``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortflex_core import (
    Array,
    Batch,
    Block,
    Device,
    DeviceEngine,
    Lasting,
    Losses,
    Port,
    Problem,
    Program,
    Value,
    buffer_value,
    check_state,
)
from ortflex_plugins.backends.epoch_runs import (
    Cost,
    Costs,
    gathered,
    joined,
    step_values,
    steps_per_run,
)
from ortflex_plugins.backends.xla.steps import (
    StepFunction,
    state_ports,
    step_function,
)

_ROOM = 4 * 2**30
"""Up to this number of bytes, training data are copied to JAX; of larger data, each run gets its rows."""


class XlaEngine(DeviceEngine):
    """A compiled problem on JAX (see :class:`ortflex_core.Engine`)."""

    def __init__(
        self, problem: Problem, device: Device, place: Any, steps: int | None = None
    ) -> None:
        import jax

        self._jax, self._place = jax, place
        self.checks_memory = place.platform != "cpu"
        super().__init__(problem, device)
        self.steps_per_run = steps_per_run(problem) if steps is None else steps
        self._ports = state_ports(problem)
        weights = {n: problem.model.initializer(n) for n in problem.parameters}
        statistics = {n: buffer_value(problem, n) for n in problem.buffers}
        start: dict[Port, Array] = {Port("parameter", of=n): a for n, a in weights.items()}
        slots = problem.slot_values()
        start |= {port: slots[name] for name, port in problem.slot_ports.items()}
        start |= {Port("buffer", of=n): a for n, a in statistics.items()}
        self._at = {port: k for k, port in enumerate(self._ports)}
        with self._wide():
            self._state = tuple(self._put(start[port]) for port in self._ports)
        self._constants = problem.constants()
        self._kept_step = 0
        self._kept: tuple[Array, ...] = ()
        self._columns: Mapping[str, Array] | None = None
        self._resident: dict[str, Any] = {}
        self._whole: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._compiled: dict[Any, Any] = {}
        self._frozen: dict[str, Any] = {}
        self._used: dict[Any, StepFunction] = {}
        self._values: dict[str, Value] | None = None
        self._runs = 0
        self._hosts: dict[Any, tuple[Any, ...]] = {}

    def _wide(self) -> Any:
        """A context with 64-bit types for this thread, which does not change JAX's default."""
        return self._jax.enable_x64(True)

    def _put(self, array: Array) -> Any:
        """A copy of an array on the device."""
        return self._jax.device_put(np.array(array, order="C"), self._place)

    # Training --------------------------------------------------------------------------------

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Losses:
        size = self.problem.updating.accumulate
        count = len(rates)
        with self._wide():
            if isinstance(batches, Block) and len(batches) == count * size and count > 1:
                return self._run(batches, (batches.size,) * size, batches.denominators, rates)
            parts = []
            for k, rate in enumerate(rates):
                own = [batches[j] for j in range(k * size, min((k + 1) * size, len(batches)))]
                sizes = tuple(b.size for b in own)
                whole = own[0] if len(own) == 1 else joined(own, "xla")
                parts.append(self._run(whole, sizes, [b.denominators for b in own], [rate]))
        return parts[0] if len(parts) == 1 else Costs(parts)

    def _run(
        self,
        batches: Batch | Block,
        sizes: tuple[int, ...],
        denominators: Sequence[Sequence[float]],
        rates: Sequence[float],
    ) -> Cost:
        function = self._function(sizes)
        columns, rows = self._data(function, batches, len(rates))
        hosts, factors = self._numbers(function, denominators, rates)
        frozen = tuple(map(self._frozen_value, function.frozen))
        given = (self._state, frozen, columns, rows, hosts)
        if columns is self._whole.get(sizes):
            run = self._compiled.get((sizes, len(rates)))
            if run is None:
                run = self._compiled[sizes, len(rates)] = function.run_of(len(rates), given)
        else:
            run = function.run_of(len(rates), given)
        self._state, costs = run(*given)
        self._step += len(rates)
        self._runs += 1
        self._values = None
        return Cost(costs, factors, len(self.problem.terms))

    def _function(self, sizes: tuple[int, ...]) -> StepFunction:
        if sizes not in self._used:
            self._used[sizes] = step_function(self.problem, sizes)
        return self._used[sizes]

    def _data(
        self, function: StepFunction, batches: Batch | Block, steps: int
    ) -> tuple[tuple[Any, ...], Any]:
        """Columns on the device, and the rows of each step among theirs."""
        if batches.rows is not None and isinstance(batches.columns, Lasting):
            if batches.columns is not self._columns:
                self._columns, self._resident = batches.columns, {}
                self._whole, self._compiled = {}, {}
                own = {n: batches.columns[n] for n in function.columns}
                if sum(a.nbytes for a in own.values()) <= _ROOM:
                    self._resident = {n: self._put(a) for n, a in own.items()}
            if self._resident:
                columns = self._whole.get(function.sizes)
                if columns is None:
                    columns = tuple(self._resident[n] for n in function.columns)
                    self._whole[function.sizes] = columns
                return columns, batches.rows.astype(np.int32).reshape(steps, -1)
        columns = tuple(gathered(batches, n) for n in function.columns)
        rows = sum(function.sizes) * steps
        return columns, np.arange(rows, dtype=np.int32).reshape(steps, -1)

    def _numbers(
        self,
        function: StepFunction,
        denominators: Sequence[Sequence[float]],
        rates: Sequence[float],
    ) -> tuple[Any, Array]:
        """The host scalars of all steps, in float64, and the factors of the costs."""
        size, steps = len(function.sizes), len(rates)
        known = self._hosts.get((function.sizes, steps))
        if known is not None and not function.counts and known[0] == rates:
            # Whole batches of unweighted data share their denominators.
            if known[1] == denominators:
                return known[2], known[3]
            if self.problem.reduction == "sum" and known[4] and np.array(denominators).all():
                return known[2], known[3]
        own = step_values(self.problem, self._constants, self._step, size, denominators, rates)
        hosts = function.numbers(own.values, steps)
        given = tuple(map(self._put, function.typed(hosts)))
        found = (rates, denominators, given, own.factors, own.weighted)
        self._hosts[function.sizes, steps] = found
        return given, found[3]

    def _frozen_value(self, port: Any) -> Any:
        """A tensor of the model that is not trained, or a statistic with its value of the file."""
        name = str(port.of)
        if name not in self._frozen:
            self._frozen[name] = self._put(buffer_value(self.problem, name))
        return self._frozen[name]

    # Inference ---------------------------------------------------------------------------------

    @property
    def _now(self) -> dict[str, Value]:
        """The weights of predictions, in memory that onnxruntime reads."""
        if self._values is None:
            slots = {n: p for n, p in self.problem.slot_ports.items() if p.role == "average"}
            weights = self.problem.averaged(
                self._read("parameter"), {n: self._array(p) for n, p in slots.items()}
            )
            values = {**weights, **self._read("buffer")}
            self._values = {n: self.device.put(a) for n, a in values.items()}
        return self._values

    # State -------------------------------------------------------------------------------------

    def _array(self, port: Port) -> Array:
        return np.array(self._state[self._at[port]])

    def _read(self, role: str) -> dict[str, Array]:
        return {str(p.of): self._array(p) for p in self._ports if p.role == role}

    def _write(self, values: Mapping[Port, Array]) -> None:
        state = list(self._state)
        with self._wide():
            for port, array in values.items():
                old = state[self._at[port]]
                state[self._at[port]] = self._put(np.asarray(array).astype(old.dtype))
        self._state = tuple(state)
        self._values = None

    def _checked(
        self, given: Mapping[str, Array], ports: Mapping[str, Port], what: str
    ) -> dict[Port, Array]:
        shapes = {n: self._state[self._at[p]].shape for n, p in ports.items()}
        check_state(given, shapes, what)
        return {ports[n]: array for n, array in given.items()}

    def state(self) -> dict[str, Array]:
        return self._read("parameter")

    def load(self, state: Mapping[str, Array]) -> None:
        ports = {n: Port("parameter", of=n) for n in self.problem.parameters}
        values = self._checked(state, ports, "parameter")
        keys, of_slot = self.problem.average_keys, self.problem.slot_ports
        values |= {of_slot[keys[n]]: array for n, array in state.items() if n in keys}
        self._write(values)

    def buffers(self) -> dict[str, Array]:
        return self._read("buffer")

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        ports = {n: Port("buffer", of=n) for n in self.problem.buffers}
        self._write(self._checked(buffers, ports, "buffer"))

    def slots(self) -> dict[str, Array]:
        slots = {n: self._array(p) for n, p in self.problem.slot_ports.items()}
        return {**slots, "step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        own = {n: a for n, a in slots.items() if n != "step"}
        self._write(self._checked(own, self.problem.slot_ports, "optimizer slot"))
        self._step = int(slots.get("step", self._step))

    def not_finite(self) -> str | None:
        for port, array in zip(self._ports, self._state, strict=True):
            if port.role == "parameter" and not np.isfinite(array).all():
                return str(port.of)
        return None

    def keep(self) -> None:
        arrays = list(map(np.asarray, self._state))
        if not self._kept:
            self._kept = tuple(map(np.empty_like, arrays))
        for kept, array in zip(self._kept, arrays, strict=True):
            np.copyto(kept, array)
        self._kept_step = self._step

    def back(self) -> None:
        with self._wide():
            self._state = tuple(map(self._put, self._kept))
        self._step, self._values = self._kept_step, None

    # What it has -------------------------------------------------------------------------------

    def programs(self) -> dict[str, Program | bytes]:
        graphs: dict[str, Program | bytes] = {}
        # That of full batches is there before the first one runs: for graph_built.
        self._function((self.problem.batch_size,) * self.problem.updating.accumulate)
        for sizes, function in self._used.items():
            for name, program in function.programs.items():
                whole = set(sizes) == {self.problem.batch_size} or name == "update"
                graphs[name if whole else f"{name}-{'-'.join(map(str, sizes))}-rows"] = program
        return graphs | {p.name: p for p in self.evaluator.programs.values()}

    def counters(self) -> dict[str, int]:
        return {"steps": self._step, "runs": self._runs}

    def close(self) -> None:
        self._used.clear()
        self._resident, self._columns, self._whole, self._compiled = {}, None, {}, {}
