"""What engines of compiled steps share: their state by ports, and runs of many steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Batch,
    Block,
    DataError,
    Device,
    DeviceEngine,
    Host,
    HostProgram,
    Port,
    Problem,
    Program,
    Value,
    buffer_value,
)
from ortflex_plugins.backends.step_plan import fewest_runs

PENALTY = Port("penalty")
RATE, COUNTER, DRAW = (Port(role).label for role in ("rate", "counter", "draw"))
_MOST_STEPS = 4096
_MOST_WORK = 2e10
"""The largest number of operations per run: Ctrl-C takes effect within about a second."""
_UNKNOWN = 32
"""Steps per run if the length of an epoch is unknown."""
T = TypeVar("T")


def steps_per_run(problem: Problem) -> int:
    """The number of steps per run: an epoch, or as many as fit into a bounded amount of work."""
    weights = sum(int(np.prod(problem.shape_of(n))) for n in problem.parameters)
    together = problem.updating.accumulate
    work = 6.0 * max(1, weights) * problem.batch_size * together
    most = max(1, min(_MOST_STEPS, int(_MOST_WORK / work)))
    return min(most, _UNKNOWN) if problem.epoch_steps is None else fewest_runs(problem, most)


def first_state(problem: Problem) -> dict[Port, Array]:
    """The values at the start, by their ports: parameters, slots, running statistics."""
    start = {Port("parameter", of=n): problem.model.initializer(n) for n in problem.parameters}
    slots = problem.slot_values()
    start |= {port: slots[name] for name, port in problem.slot_ports.items()}
    start |= {Port("buffer", of=n): buffer_value(problem, n) for n in problem.buffers}
    return {port: np.asarray(array) for port, array in start.items()}


class PortEngine(DeviceEngine):
    """An engine that reads and writes its state by ports.

    ``_parameters`` and ``_statistics`` are the ports by the names of their tensors, ``_step`` is the
    number of finished steps, ``_runs`` that of calls. A subclass sets ``_copies`` to None when the state
    changes.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self._parameters = {n: Port("parameter", of=n) for n in problem.parameters}
        self._statistics = {n: Port("buffer", of=n) for n in problem.buffers}
        self._copies: dict[str, Value] | None = None
        """The state in memory that onnxruntime reads; None if it is not the current one."""
        self._runs = 0

    @property
    def _now(self) -> Mapping[str, Value]:
        if self._copies is None:
            ports = self.problem.slot_ports.items()
            averages = self._read({n: p for n, p in ports if p.role == "average"})
            weights = self.problem.averaged(self._read(self._parameters), averages)
            arrays = {**weights, **self._read(self._statistics)}
            self._copies = {n: self.device.put(array) for n, array in arrays.items()}
        return self._copies

    @abc.abstractmethod
    def _read(self, ports: Mapping[str, Port]) -> dict[str, Array]:
        """Copies of the arrays of these ports, by name."""

    @abc.abstractmethod
    def _write(self, given: Mapping[str, Array], ports: Mapping[str, Port], what: str) -> None:
        """Replace the arrays of these ports; ``what`` names one of them in an error."""

    def state(self) -> dict[str, Array]:
        return self._read(self._parameters)

    def load(self, state: Mapping[str, Array]) -> None:
        self._write(state, self._parameters, "parameter")
        keys = self.problem.average_keys if self.problem.updating.average is not None else {}
        own = {keys[n]: array for n, array in state.items() if n in keys}
        self._write(own, self.problem.slot_ports, "average")

    def buffers(self) -> dict[str, Array]:
        return self._read(self._statistics)

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        self._write(buffers, self._statistics, "buffer")

    def slots(self) -> dict[str, Array]:
        return {**self._read(self.problem.slot_ports), "step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        own = {n: a for n, a in slots.items() if n != "step"}
        self._write(own, self.problem.slot_ports, "optimizer slot")
        self._step = int(slots.get("step", self._step))

    def counters(self) -> dict[str, int]:
        return {"steps": self._step, "runs": self._runs}


class HostNumbers:
    """The host scalars of a program for several steps at once.

    Attributes:
        types: name and type of each.
        counts: whether they depend on the number of the step.
    """

    def __init__(self, program: Program) -> None:
        expressions = [h.expression for h in program.hosts]
        self._hosts = HostProgram(expressions)
        self.types = [(h.spec.name, h.spec.numpy) for h in program.hosts]
        self._plain = all(map(_plain, expressions))
        self.counts = not self._hosts.symbols.isdisjoint({COUNTER, DRAW})

    def __call__(self, values: Mapping[str, Any], steps: int) -> Array:
        """The numbers in float64, [steps, scalars].

        Values are numbers, or arrays with one for each step.
        """
        if not self.types:
            return np.zeros((steps, 0))
        if self._plain:
            # Python's arithmetic on arrays: the same bits, without a loop over the steps.
            with np.errstate(all="ignore"):
                found = self._hosts(values)
            out = np.stack([np.broadcast_to(np.asarray(v, np.float64), steps) for v in found], 1)
            if np.isfinite(out).all():
                return out
        names = [n for n in values if n in self._hosts.symbols]
        columns = [np.broadcast_to(values[n], steps).tolist() for n in names]
        rows = (
            dict(zip(names, row, strict=True))
            for _, *row in zip(range(steps), *columns, strict=True)
        )
        return np.array([self._hosts(row) for row in rows], np.float64)


_ARITHMETIC = frozenset({"symbol", "Add", "Sub", "Mul", "Div", "Neg", "Identity", "Abs"})


def _plain(expression: Host) -> bool:
    """Whether an expression is the same in Python and in numpy, to the last bit."""
    parts = [a for a in expression.args if isinstance(a, Host)]
    return expression.op in _ARITHMETIC and all(map(_plain, parts))


@attrs.frozen
class StepValues:
    """The values of the host symbols of several steps.

    Attributes:
        values: for each batch of a step, numbers or arrays with one for each step.
        factors: of every batch and term, [steps, batches · terms]: what multiplies Σ w·l.
        weighted: whether no step has a denominator of 0.
    """

    values: tuple[Mapping[str, Any], ...]
    factors: Array
    weighted: bool


class RunNumbers(Generic[T]):
    """The host scalars of runs, in the form that an engine passes on; those of equal runs are made once."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._constants = problem, problem.constants()
        self._known: dict[Hashable, tuple[Any, Any, T, Array, bool]] = {}

    def values(
        self,
        done: int,
        batches: int,
        denominators: Sequence[Sequence[float]],
        rates: Sequence[float],
    ) -> StepValues:
        """The host symbols of the steps after ``done`` steps, each of a number of batches."""
        steps = len(rates)
        below = np.array(denominators, np.float64).reshape(steps, batches, -1)
        # One after the other, as Python adds them.
        sums = np.cumsum(below, axis=1)[:, -1]
        terms = self._problem.terms
        factors = np.array([t.factor for t in terms])
        divisors = 1.0 if self._problem.reduction == "sum" else np.where(sums == 0, 1.0, sums)
        scales = np.where(sums == 0, 0.0, factors / divisors)
        count = np.arange(done, done + steps, dtype=np.float64)
        values: dict[str, Any] = {
            **self._constants,
            RATE: np.array(rates, np.float64),
            COUNTER: count + 1,
            **{t.scale_symbol: scales[:, k] for k, t in enumerate(terms)},
        }
        first = count * self._problem.updating.accumulate + 1
        own = tuple({**values, DRAW: first + j} for j in range(batches))
        return StepValues(own, np.tile(scales, batches), bool((sums != 0).all()))

    def __call__(
        self,
        key: Hashable,
        make: Callable[[tuple[Mapping[str, Any], ...]], T],
        counts: bool,
        run: tuple[int, int, Sequence[Sequence[float]], Sequence[float]],
    ) -> tuple[T, Array]:
        """The host scalars that ``make`` has for the symbols of each batch, and the factors of the costs.

        ``key`` stands for the graph and the number of steps, ``counts`` says whether the scalars depend on
        the number of the step, ``run`` are the arguments of :meth:`values`.
        """
        _, _, denominators, rates = run
        known = self._known.get(key)
        if known is not None and not counts and known[0] == rates:
            # Whole batches of unweighted data share their denominators.
            if known[1] == denominators:
                return known[2], known[3]
            if self._problem.reduction == "sum" and known[4] and all(map(all, denominators)):
                return known[2], known[3]
        own = self.values(*run)
        numbers = make(own.values)
        self._known[key] = (rates, denominators, numbers, own.factors, own.weighted)
        return numbers, own.factors

    def clear(self) -> None:
        """Forget all runs."""
        self._known.clear()


@attrs.frozen
class Cost:
    """Costs of several steps, where they were computed until they are read."""

    costs: Any
    factors: Array
    """Of every batch and term, [steps, batches · terms]."""
    terms: int
    """The number of losses."""

    def read(self) -> list[tuple[float, ...]]:
        """(loss, penalty) per step, then each of several losses."""
        costs = np.asarray(self.costs, np.float64)
        steps, count = self.factors.shape
        if count == 1 == costs.shape[1]:
            return [(loss, 0.0) for loss in (costs * self.factors).ravel().tolist()]
        products = costs[:, :count] * self.factors
        penalties = [0.0] * steps if costs.shape[1] == count else costs[:, count].tolist()
        each = products.reshape(steps, -1, self.terms).sum(axis=1).T.tolist()
        further = each if self.terms > 1 else []
        return list(zip(products.sum(axis=1).tolist(), penalties, *further, strict=True))


def gathered(batches: Batch | Block, name: str) -> Array:
    """A column's rows of all batches."""
    if isinstance(batches, Batch):
        own = batches.array(name)
        # The engine may read it after the call, so the user's array is copied.
        return own.copy() if batches.rows is None else np.asarray(own)
    return np.take(batches.columns[name], batches.rows, axis=0)


def joined(batches: Sequence[Batch], backend: str) -> Batch:
    """Several batches as one; ``backend`` is for the error."""
    first = batches[0]
    size = sum(b.size for b in batches)
    if all(b.columns is first.columns and b.rows is not None for b in batches):
        rows = np.concatenate([b.rows for b in batches if b.rows is not None])
        return Batch(first.columns, rows, size, [])
    for name in first.columns:
        shapes = list(dict.fromkeys(b.array(name).shape[1:] for b in batches))
        if len(shapes) > 1:
            raise DataError(
                f"{backend}: the batches of one step (accumulate={len(batches)}) have rows of different "
                f"shapes in {name!r}: {shapes[0]} and {shapes[1]}; pad them to one shape, or use "
                "backend='fused'"
            )
    columns = {n: np.concatenate([b.array(n) for b in batches]) for n in first.columns}
    return Batch(columns, None, size, [])
