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
    Lasting,
    Losses,
    Port,
    Problem,
    Program,
    buffer_value,
    check_state,
)
from ortflex_plugins.backends.epoch_runs import (
    Cost,
    PortEngine,
    RunNumbers,
    first_state,
    gathered,
    joined,
    steps_per_run,
)
from ortflex_plugins.backends.step_plan import SeveralRuns, split
from ortflex_plugins.backends.xla.steps import StepFunction, state_ports, step_function

_ROOM = 4 * 2**30
"""Up to this number of bytes, training data are copied to JAX; of larger data, each run gets its rows."""


class XlaEngine(PortEngine):
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
        start = first_state(problem)
        self._at = {port: k for k, port in enumerate(self._ports)}
        with self._wide():
            self._state = tuple(self._put(start[port]) for port in self._ports)
        self._kept_step = 0
        self._kept: tuple[Array, ...] = ()
        self._columns: Mapping[str, Array] | None = None
        self._resident: dict[str, Any] = {}
        self._whole: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._compiled: dict[Any, Any] = {}
        self._frozen: dict[str, Any] = {}
        self._used: dict[Any, StepFunction] = {}
        self._numbers = RunNumbers[tuple[Any, ...]](problem)

    def _wide(self) -> Any:
        """A context with 64-bit types for this thread, which does not change JAX's default."""
        return self._jax.enable_x64(True)

    def _put(self, array: Array) -> Any:
        """A copy of an array on the device."""
        return self._jax.device_put(np.array(array, order="C"), self._place)

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Losses:
        size = self.problem.updating.accumulate
        count = len(rates)
        with self._wide():
            if isinstance(batches, Block) and len(batches) == count * size and count > 1:
                return self._run(batches, (batches.size,) * size, batches.denominators, rates)
            parts = []
            for own, rate in zip(split(batches, count, size), rates, strict=True):
                sizes = tuple(b.size for b in own)
                whole = own[0] if len(own) == 1 else joined(own, "xla")
                parts.append(self._run(whole, sizes, [b.denominators for b in own], [rate]))
        return parts[0] if len(parts) == 1 else SeveralRuns(parts)

    def _run(
        self,
        batches: Batch | Block,
        sizes: tuple[int, ...],
        denominators: Sequence[Sequence[float]],
        rates: Sequence[float],
    ) -> Cost:
        function = self._function(sizes)
        columns, rows = self._data(function, batches, len(rates))
        hosts, factors = self._numbers(
            (sizes, len(rates)),
            lambda values: tuple(
                map(self._put, function.typed(function.numbers(values, len(rates))))
            ),
            function.counts,
            (self._step, len(sizes), denominators, rates),
        )
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
        self._copies = None
        return Cost(costs, factors, len(self.problem.terms))

    def _function(self, sizes: tuple[int, ...]) -> StepFunction:
        if sizes not in self._used:
            self._used[sizes] = step_function(self.problem, sizes, self._place.platform)
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

    def _frozen_value(self, port: Any) -> Any:
        """A tensor of the model that is not trained, or a statistic with its value of the file."""
        name = str(port.of)
        if name not in self._frozen:
            self._frozen[name] = self._put(buffer_value(self.problem, name))
        return self._frozen[name]

    def _read(self, ports: Mapping[str, Port]) -> dict[str, Array]:
        return {name: np.array(self._state[self._at[port]]) for name, port in ports.items()}

    def _write(self, given: Mapping[str, Array], ports: Mapping[str, Port], what: str) -> None:
        check_state(given, {n: self._state[self._at[p]].shape for n, p in ports.items()}, what)
        state = list(self._state)
        with self._wide():
            for name, array in given.items():
                at = self._at[ports[name]]
                state[at] = self._put(np.asarray(array).astype(state[at].dtype))
        self._state = tuple(state)
        self._copies = None

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

    def restore(self) -> None:
        with self._wide():
            self._state = tuple(map(self._put, self._kept))
        self._step, self._copies = self._kept_step, None

    def programs(self) -> dict[str, Program | bytes]:
        graphs: dict[str, Program | bytes] = {}
        # That of full batches is there before the first one runs: for graph_built.
        self._function((self.problem.batch_size,) * self.problem.updating.accumulate)
        for sizes, function in self._used.items():
            for name, program in function.programs.items():
                whole = set(sizes) == {self.problem.batch_size} or name == "update"
                graphs[name if whole else f"{name}-{'-'.join(map(str, sizes))}-rows"] = program
        return graphs | {p.name: p for p in self.evaluator.programs.values()}

    def close(self) -> None:
        self._used.clear()
        self._resident, self._columns, self._whole, self._compiled = {}, None, {}, {}
