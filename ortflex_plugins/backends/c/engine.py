"""The engine of the backend ``c``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortflex_core import (
    Array,
    Batch,
    Block,
    DataError,
    Device,
    Key,
    Lasting,
    Losses,
    Port,
    Problem,
    Program,
    Unsupported,
    buffer_value,
    check_state,
    first_not_finite,
)
from ortflex_plugins.backends.c.steps import Compiled, aligned, layout_of, part_of, views
from ortflex_plugins.backends.epoch_runs import (
    Cost,
    PortEngine,
    RunNumbers,
    first_state,
    steps_per_run,
)
from ortflex_plugins.backends.step_plan import SeveralRuns, split
from ortflex_plugins.operators.calls import NotTranslatable


class CEngine(PortEngine):
    """A compiled problem (see :class:`ortflex_core.Engine`)."""

    def __init__(self, problem: Problem, device: Device, steps: int | None = None) -> None:
        super().__init__(problem, device)
        self.steps_per_run = steps_per_run(problem) if steps is None else steps
        self._layout = layout_of(problem)
        self._block = aligned(self._layout.size)
        self._arrays: dict[Key, Array] = dict(views(self._layout, self._block))
        for port, array in first_state(problem).items():
            self._arrays[port][...] = array
        self._gradients = [
            a for p, a in self._arrays.items() if getattr(p, "role", "") == "gradient"
        ]
        self._trained = self._parts("parameter")
        self._kept: Array | None = None
        self._kept_step = 0
        self._numbers = RunNumbers[Array](problem)
        self._compiled: dict[tuple[str, int | None], Compiled] = {}
        self._data: dict[int, tuple[Any, tuple[Array, ...]]] = {}
        self._frozen: dict[Key, Array] = {}
        alone = problem.updating.accumulate == 1
        self._function("step" if alone else "gradient", problem.batch_size)

    def _parts(self, role: str) -> list[Array]:
        """The memory of all tensors of a role: one array for each type."""
        parts: dict[str, tuple[int, int, Any]] = {}
        for memory, place in zip(self._layout.memory, self._layout.places, strict=True):
            if isinstance(memory.key, Port) and memory.key.role == role:
                size = int(np.prod(memory.shape, dtype=np.int64)) * memory.dtype.itemsize
                first = parts.get(place.member, (place.start, 0, None))[0]
                parts[place.member] = (first, place.start + size, memory.dtype)
        return [self._block[a:b].view(dtype) for a, b, dtype in parts.values()]

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Losses:
        size = self.problem.updating.accumulate
        self._copies = None
        if size == 1:
            if isinstance(batches, Block) and len(batches) == len(rates) > 1:
                return self._run(batches, batches.denominators, rates)
            parts = [
                self._run(batch, [batch.denominators], [rate])
                for batch, rate in zip(batches, rates, strict=True)
            ]
        else:
            steps = zip(split(batches, len(rates), size), rates, strict=True)
            parts = [self._several(own, rate) for own, rate in steps]
        return parts[0] if len(parts) == 1 else SeveralRuns(parts)

    def _run(
        self,
        batches: Batch | Block,
        denominators: Sequence[Sequence[float]],
        rates: Sequence[float],
    ) -> Cost:
        steps = len(rates)
        compiled = self._function("step", batches.size)
        numbers, factors = self._numbers(
            (batches.size, steps),
            lambda values: np.ascontiguousarray(compiled.part.numbers(values[0], steps)),
            compiled.part.numbers.counts,
            (self._step, 1, denominators, rates),
        )
        costs = self._call(compiled, batches, steps, numbers)
        self._step += steps
        self._runs += 1
        return Cost(costs, factors, len(self.problem.terms))

    def _several(self, batches: Sequence[Batch], rate: float) -> Cost:
        """A step of several batches: their gradients are added one after the other."""
        below = [b.denominators for b in batches]
        own = self._numbers.values(self._step, len(batches), below, [rate])
        costs, sums = [], []
        for k, batch in enumerate(batches):
            compiled = self._function("gradient", batch.size)
            numbers = compiled.part.numbers(own.values[k], 1)
            costs.append(self._call(compiled, batch, 1, numbers))
            for at, gradient in enumerate(self._gradients):
                if k == 0:
                    sums.append(gradient.copy())
                else:
                    sums[at] += gradient
        for gradient, total in zip(self._gradients, sums, strict=True):
            gradient[...] = total
        update = self._function("update", None)
        numbers = update.part.numbers(own.values[0], 1)
        last, _ = update(self._frozen_of(update), np.zeros(1, np.int64), 1, numbers)
        self._step += 1
        self._runs += 1
        costs = [*costs, last]
        return Cost(np.concatenate(costs, axis=1), own.factors, len(self.problem.terms))

    def _call(
        self, compiled: Compiled, batches: Batch | Block, steps: int, numbers: Array
    ) -> Array:
        data, rows = self._columns(compiled, batches, steps)
        costs, in_range = compiled(data, rows, steps, numbers)
        if not in_range:
            raise DataError(
                "an index that the data give is outside of the tensor that it indexes: a label that is not "
                "a class of the model, or a token beyond its embedding; the state is unusable now. "
                "backend='fused' names the operator"
            )
        return costs

    def _function(self, kind: str, rows: int | None) -> Compiled:
        key = (kind, rows)
        if key not in self._compiled:
            try:
                part = part_of(self.problem, kind, rows)
            except NotTranslatable as error:
                raise Unsupported(
                    f"the backend c has no form in C for {error}, in batches of {rows} rows; use "
                    "backend='fused', or drop_last=True"
                ) from error
            self._compiled[key] = Compiled(part, self._block.ctypes.data)
        return self._compiled[key]

    def _columns(
        self, compiled: Compiled, batches: Batch | Block, steps: int
    ) -> tuple[tuple[Array, ...], Array]:
        """The columns and frozen tensors, and the rows of all batches."""
        program = compiled.part.program
        columns = batches.columns
        known = self._data.get(id(compiled))
        if known is None or known[0] is not columns or not isinstance(columns, Lasting):
            arrays = []
            names: dict[Key, str] = {p: n for n, p in self.problem.column_ports.items()}
            for key in compiled.part.generated.columns:
                spec = program.takes[key]
                array = np.asarray(columns[names[key]])
                wanted = tuple(spec.shape or ())[1:]
                if array.shape[1:] != wanted or array.dtype != spec.numpy:
                    raise DataError(
                        f"the column {names[key]!r} has rows of shape {list(array.shape[1:])} and type "
                        f"{array.dtype}, expected {list(wanted)} and {spec.numpy}: the backend c compiles "
                        "a step for one shape; use backend='fused'"
                    )
                arrays.append(np.ascontiguousarray(array))
            known = (columns, (*arrays, *self._frozen_of(compiled)))
            self._data[id(compiled)] = known
        if batches.rows is None:
            return known[1], np.arange(batches.size * steps, dtype=np.int64)
        return known[1], np.ascontiguousarray(batches.rows, np.int64)

    def _frozen_of(self, compiled: Compiled) -> tuple[Array, ...]:
        """Tensors of the model that are not trained, and statistics with their values of the file."""
        for key in compiled.part.generated.frozen:
            if key not in self._frozen:
                assert isinstance(key, Port)
                value = buffer_value(self.problem, str(key.of))
                self._frozen[key] = np.ascontiguousarray(value)
        return tuple(self._frozen[key] for key in compiled.part.generated.frozen)

    def _read(self, ports: Mapping[str, Port]) -> dict[str, Array]:
        return {name: self._arrays[port].copy() for name, port in ports.items()}

    def _write(self, given: Mapping[str, Array], ports: Mapping[str, Port], what: str) -> None:
        check_state(given, {n: self._arrays[p].shape for n, p in ports.items()}, what)
        for name, array in given.items():
            self._arrays[ports[name]][...] = array
        self._copies = None

    def not_finite(self) -> str | None:
        # Counting takes half of the time of .all().
        if all(np.count_nonzero(np.isfinite(part)) == part.size for part in self._trained):
            return None
        return first_not_finite({n: self._arrays[p] for n, p in self._parameters.items()})

    def keep(self) -> None:
        if self._kept is None:
            self._kept = np.empty_like(self._block)
        self._kept[...] = self._block
        self._kept_step = self._step

    def restore(self) -> None:
        assert self._kept is not None
        np.copyto(self._block, self._kept)
        self._step, self._copies = self._kept_step, None

    def programs(self) -> dict[str, Program | bytes]:
        graphs: dict[str, Program | bytes] = {}
        for (kind, rows), compiled in self._compiled.items():
            whole = rows is None or rows == self.problem.batch_size
            graphs[kind if whole else f"{kind}-{rows}-rows"] = compiled.part.program
        return graphs | {p.name: p for p in self.evaluator.programs.values()}

    def counters(self) -> dict[str, int]:
        return {**super().counters(), "compiled": len(self._compiled)}

    def close(self) -> None:
        self._compiled.clear()
        self._data.clear()
        self._numbers.clear()
