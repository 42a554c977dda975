"""Training steps as one function over arrays: data gathered by row, state in, state and costs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ortflex_core import (
    COLUMNS,
    Array,
    Key,
    Port,
    Problem,
    Program,
    get_program,
    gradient_program,
    problem_key,
    step_program,
    update_program,
)
from ortflex_plugins.backends.epoch_runs import PENALTY, HostNumbers
from ortflex_plugins.backends.step_plan import REFUSALS
from ortflex_plugins.backends.xla.namespaces import JaxForms
from ortflex_plugins.operators.translation import Translation

Arrays = tuple[Any, ...]


def state_ports(problem: Problem) -> list[Port]:
    """The values that a step updates, in the order of the state: parameters, slots, running statistics."""
    return [
        *(Port("parameter", of=n) for n in problem.parameters),
        *problem.slot_specs,
        *(Port("buffer", of=n) for n in problem.buffers),
    ]


class Part:
    """A program of a step with the expressions of its host scalars."""

    def __init__(self, program: Program, forms: JaxForms) -> None:
        self.program = program
        self._translation = Translation(program, forms)
        self.numbers = HostNumbers(program)
        self.types, self.counts = self.numbers.types, self.numbers.counts

    def __call__(self, given: Mapping[Key, Any], hosts: Any) -> dict[Key, Any]:
        """The outputs by port; ``hosts`` has one number for each host scalar."""
        feeds = {spec.name: given[key] for key, spec in self.program.takes.items()}
        for k, (name, dtype) in enumerate(self.types):
            feeds[name] = hosts[k].astype(dtype)
        results = self._translation(feeds)
        return {key: results[spec.name] for key, spec in self.program.gives.items()}


class StepFunction:
    """One step on batches of the given sizes, as a function over arrays.

    ``call(state, frozen, columns, rows, hosts)`` returns the state and the costs: Σ w·l of every loss
    term [batches, terms], and the penalty. A step of one batch gets its rows as ``columns``, and None as
    ``rows``: the function is then the same for data of any length, and is traced once. Equal batches of one
    step are scanned.
    """

    def __init__(self, problem: Problem, sizes: tuple[int, ...], platform: str) -> None:
        import jax

        self._jax = jax
        self._forms = forms = JaxForms(platform)
        self.sizes = sizes
        self.ports = state_ports(problem)
        self.totals = [t.total_port for t in problem.terms]
        self.column_ports = dict(problem.column_ports)
        self.parameters = problem.parameters
        # Without this option XLA omits roundings to a short type between the operators that it fuses.
        self._options = {"xla_allow_excess_precision": False} if problem.is_lowered else None
        whole = problem.batch_size
        alone = len(sizes) == 1
        if problem.updating.accumulate == 1:
            made = {sizes[0]: Part(_sized(step_program, problem, sizes[0], whole), forms)}
            self.update = None
        else:
            made = {n: Part(_sized(gradient_program, problem, n, whole), forms) for n in set(sizes)}
            self.update = Part(update_program(problem), forms)
        self.parts = [made[n] for n in sizes]
        self.scanned = not alone and len(made) == 1
        self.programs = {p.program.name: p.program for p in made.values()}
        if self.update is not None:
            self.programs["update"] = self.update.program
        every = [*made.values(), *([] if self.update is None else [self.update])]
        known = {*self.ports, *self.column_ports.values()}
        taken = dict.fromkeys(k for p in every for k in p.program.takes)
        self.frozen = [k for k in taken if k not in known and _from_file(k)]
        self.columns = [n for n, port in self.column_ports.items() if port in taken]
        self.call = jax.jit(self._step)
        self._runs: dict[Any, Any] = {}
        self.counts = any(p.counts for p in every)
        types = [t for p in self.parts for _, t in p.types]
        alike = types if self.update is None else [np.dtype(np.float64)]
        self._groups = [
            (t, [k for k, u in enumerate(types) if u == t]) for t in dict.fromkeys(alike)
        ]
        """The sources of the host scalars of a step of one batch, by type."""

    def numbers(self, values: Sequence[Mapping[str, Any]], steps: int) -> Array:
        """The host scalars of several steps; ``values`` are the symbols of each batch of a step."""
        found = [p.numbers(own, steps) for p, own in zip(self.parts, values, strict=True)]
        found += [] if self.update is None else [self.update.numbers(values[0], steps)]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1)

    def typed(self, numbers: Array) -> Arrays:
        """The host scalars in the form of the compiled step: one array per type."""
        if self.update is not None:
            return (numbers,)
        return tuple(numbers[:, where].astype(dtype) for dtype, where in self._groups)

    def _scalars(self, hosts: Arrays) -> Any:
        """The host scalars of a step, in their order."""
        if self.update is not None:
            return hosts[0]
        out: dict[int, Any] = {}
        for (_, where), values in zip(self._groups, hosts, strict=True):
            out |= {k: values[at] for at, k in enumerate(where)}
        return [out[k] for k in range(len(out))]

    def run_of(self, steps: int, arguments: tuple[Any, ...]) -> Any:
        """The compiled function of several steps: the one of a single step, or a scan.

        Its arguments have the shapes and types of ``arguments``; the first one, the state, is
        donated.
        """
        columns, place = arguments[2], next(iter(arguments[0][0].devices()))
        key = (steps, place, tuple((c.shape, c.dtype) for c in columns))
        if key not in self._runs:
            self._runs[key] = self._compiled(steps, arguments)
        return self._runs[key]

    def _compiled(self, steps: int, arguments: tuple[Any, ...]) -> Any:
        function = self._single if steps == 1 else self._several
        # JAX keeps what it traced for a method, but not for another partial.
        made = self._jax.jit(partial(function), donate_argnums=(0,))
        # Compiled in advance, because a call through jit takes twice as long.
        run = made.lower(*arguments).compile(compiler_options=self._options)
        if self._forms.has_wide_sums and self._forms.allows_wide_sums:
            # XLA compiles some products of bfloat16 with sums in float32 that it cannot compute.
            state, *others = arguments
            try:
                self._jax.block_until_ready(run(tuple(x.copy() for x in state), *others))
            except self._jax.errors.JaxRuntimeError as error:
                if "UNIMPLEMENTED" not in str(error):
                    raise
                self._forms.allows_wide_sums = False
                self.call = self._jax.jit(partial(self._step))
                return self._compiled(steps, arguments)
        return run

    def _single(
        self, state: Arrays, frozen: Arrays, columns: Arrays, rows: Any, hosts: Any
    ) -> tuple[Arrays, Any]:
        first = tuple(h[0] for h in hosts)
        state, costs = self.call(state, frozen, *self.taken(columns, rows[0]), first)
        return state, costs[None]

    def _several(
        self, state: Arrays, frozen: Arrays, columns: Arrays, rows: Any, hosts: Any
    ) -> tuple[Arrays, Any]:
        def one(now: Arrays, at: Arrays) -> tuple[Arrays, Any]:
            after, costs = self.call(now, frozen, *self.taken(columns, at[0]), at[1])
            return after, costs

        out: tuple[Arrays, Any] = self._jax.lax.scan(one, state, (rows, hosts))
        return out

    def taken(self, columns: Arrays, rows: Any) -> tuple[Arrays, Any]:
        """The columns and rows for :attr:`call`; with one batch the rows are gathered before it."""
        if self.update is not None:
            return columns, rows
        return tuple(_gather(column, rows) for column in columns), None

    def _step(
        self, state: Arrays, frozen: Arrays, columns: Arrays, rows: Any, hosts: Any
    ) -> tuple[Arrays, Any]:
        with self._jax.default_matmul_precision("highest"):
            given: dict[Key, Any] = dict(zip(self.ports, state, strict=True))
            given |= dict(zip(self.frozen, frozen, strict=True))
            if self.update is None:
                return self._alone(given, columns, hosts)
            return self._together(self.update, given, columns, rows, hosts)

    def _alone(self, given: dict[Key, Any], columns: Arrays, hosts: Any) -> tuple[Arrays, Any]:
        part = self.parts[0]
        hosts = self._scalars(hosts)
        ports = (self.column_ports[name] for name in self.columns)
        results = part(given | dict(zip(ports, columns, strict=True)), hosts)
        costs = [results[port] for port in self.totals]
        costs += [results[PENALTY]] if PENALTY in results else []
        return self._after(given, results), self._row(costs)

    def _together(
        self, update: Part, given: dict[Key, Any], columns: Arrays, rows: Any, hosts: Any
    ) -> tuple[Arrays, Any]:
        """Gradients of every batch, added up in order, and the update."""
        xp, lax = self._jax.numpy, self._jax.lax
        hosts = self._scalars(hosts)
        moving = [p for p in self.ports if p.role == "buffer"]
        gradients = [Port("gradient", of=n) for n in self.parameters]
        count = [len(p.program.hosts) for p in self.parts]

        def one(part: Part, now: Any, own: Any, numbers: Any) -> tuple[Any, Any]:
            buffers, sums = now
            now_given = given | dict(zip(moving, buffers, strict=True))
            results = part(now_given | self._rows(columns, own), numbers)
            after = tuple(results.get(p, b) for p, b in zip(moving, buffers, strict=True))
            fresh = [results[p] for p in gradients]
            added = fresh if sums is None else [a + b for a, b in zip(sums, fresh, strict=True)]
            return (after, tuple(added)), [results[port] for port in self.totals]

        now: Any = (tuple(given[p] for p in moving), None)
        totals: list[Any] = []
        if self.scanned:
            size, n = self.sizes[0], len(self.sizes)
            index, numbers = rows.reshape(n, size), hosts[: n * count[0]].reshape(n, count[0])
            now, first = one(self.parts[0], now, index[0], numbers[0])

            def again(carry: Any, at: Any) -> Any:
                carry, costs = one(self.parts[0], carry, *at)
                return carry, self._row(costs)

            now, others = lax.scan(again, now, (index[1:], numbers[1:]))
            totals = [*first, *others.reshape(-1)]
            flat = xp.concatenate([self._row(first), others.reshape(-1)])
        else:
            at = start = 0
            for part, size, many in zip(self.parts, self.sizes, count, strict=True):
                own, numbers = rows[at : at + size], hosts[start : start + many]
                now, costs = one(part, now, own, numbers)
                totals += costs
                at, start = at + size, start + many
            flat = self._row(totals)
        buffers, sums = now
        moved = given | dict(zip(moving, buffers, strict=True))
        results = update(moved | dict(zip(gradients, sums, strict=True)), hosts[sum(count) :])
        if PENALTY in results:
            penalty = results[PENALTY].reshape(1)
            flat = xp.concatenate(
                [flat, penalty.astype(xp.promote_types(flat.dtype, penalty.dtype))]
            )
        return self._after(moved, results), flat

    def _row(self, costs: Sequence[Any]) -> Any:
        return self._jax.numpy.stack([cost.reshape(()) for cost in costs])

    def _rows(self, columns: Arrays, rows: Any) -> dict[Key, Any]:
        """The rows of a batch, by port."""
        return {
            self.column_ports[name]: _gather(column, rows)
            for name, column in zip(self.columns, columns, strict=True)
        }

    def _after(self, given: Mapping[Key, Any], results: Mapping[Key, Any]) -> Arrays:
        # A program may give a vector as a row of a matrix. A state that no node computes stays.
        asarray = self._jax.numpy.asarray
        return tuple(asarray(results.get(p, given[p])).reshape(given[p].shape) for p in self.ports)


def _gather(column: Any, rows: Any) -> Any:
    """Rows of a column, which exist."""
    return column.at[rows].get(mode="promise_in_bounds")


def _from_file(key: Key) -> bool:
    """Whether an input of a program is a tensor of the model that is not trained."""
    return isinstance(key, Port) and key.role not in (*COLUMNS, "gradient")


def _sized(make: Any, problem: Problem, rows: int, whole: int) -> Program:
    """The program for batches of a size, shared by problems of one structure."""
    try:
        return _program(make, problem, rows if rows == whole else None)
    except REFUSALS:
        return _program(make, problem, rows)


def _program(make: Any, problem: Problem, rows: int | None) -> Program:
    key = (f"xla {make.__name__}", problem_key(problem), rows)
    program: Program = get_program(key, lambda: make(problem, rows=rows, relu_mask="Sign"))
    return program


def step_function(problem: Problem, sizes: tuple[int, ...], platform: str) -> StepFunction:
    """The function of a step, shared by problems of one structure."""
    key = ("xla step", problem_key(problem), sizes, problem.batch_size, platform)
    function: StepFunction = get_program(key, lambda: StepFunction(problem, sizes, platform))
    return function
