"""Steps of several batches: gradients are summed, then the weights are updated.

On the fused backend there are three graphs: one computes a batch's gradient, one adds it to the sum,
((g₀ + g₁) + g₂) …, and one updates the weights from the sum. The memory is that of one batch; the
sums exist in two versions that swap, like the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ortflex_core import (
    Batch,
    Binder,
    DataBuffers,
    Device,
    GradientExchange,
    HostVector,
    Key,
    PlanCache,
    Port,
    Program,
    Scalar,
    TensorSpec,
    Twins,
    Value,
    Workspace,
    adding_program,
    batch_gradient,
    get_session,
    gradient_program,
    ports_of,
    read_into,
    rounds_short_types,
    share_port,
    statistics_moves,
    update_program,
)

if TYPE_CHECKING:
    from ortflex_core import Problem


_RATE, _COUNTER, _DRAW = (Port(role).label for role in ("rate", "counter", "draw"))
_PENALTY = Port("penalty")
_BATCH = 2
"""The version number of a single batch's gradient, next to the versions 0 and 1 of the sums."""


def total_denominators(batches: Sequence[Batch]) -> list[float]:
    """The denominators of a step's losses: the sums over its batches."""
    return [sum(parts) for parts in zip(*(b.denominators for b in batches), strict=True)]


def bind_program(
    device: Device,
    threads: int,
    frozen: Callable[[Key], Value],
    program: Program,
    hosts: HostVector,
    before: Mapping[Key, Value],
    after: Mapping[Key, Value],
) -> Binder:
    """Bindings of a program to host scalars and, by ports, to its inputs and outputs.

    ``frozen`` returns the value of an input that is not in ``before``.
    """
    binder = Binder(get_session(program, device, threads), program.name)
    for key, spec in program.takes.items():
        binder.input(spec.name, before.get(key) or frozen(key))
    binder.hosts(hosts)
    for key, spec in program.gives.items():
        binder.output(spec.name, after[key])
    return binder


class GradientSum:
    """The sum of the gradients of a step's batches, in two versions that swap: ((g₀ + g₁) + g₂) ….

    The gradient of the first batch is written into the current version of ``twins``, each of the
    others into ``batch``; :meth:`add` adds it. With ``only``, the others are left out.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        batch: Mapping[str, Value],
        bind: Callable[..., Binder],
        only: Collection[str] | None = None,
    ) -> None:
        self._device, self.batch, self._bind = device, batch, bind
        names = [n for n in problem.parameters if only is None or n in only]
        zeros = {n: np.zeros_like(problem.model.initializer(n)) for n in names}
        # The sum over several processes is computed in place.
        in_place = names if problem.peers is not None else ()
        self.twins = Twins(device, zeros, ports_of("gradient", zeros), in_place)
        self.program = adding_program(problem)
        self._hosts = HostVector(self.program, device, {})
        self.binders: dict[int, Binder] = {}

    def add(self) -> None:
        """Add a batch's gradient to the sum."""
        old = self.twins.current
        if old not in self.binders:
            before = self.twins.at_ports(old)
            before |= {batch_gradient(n): value for n, value in self.batch.items()}
            after = self.twins.at_ports(1 - old)
            self.binders[old] = self._bind(self.program, self._hosts, before, after)
        self.binders[old].run()
        self.twins.current = 1 - old

    def share(self, exchange: GradientExchange) -> bool:
        """Let an exchange add in this memory if the host can read it; returns whether it can."""
        views = {name: self._device.view(value) for name, value in self.twins.values.items()}
        readable = {name: view for name, view in views.items() if view is not None}
        if len(readable) < len(views):
            return False
        exchange.sums = readable
        return True


def names_of(values: Iterable[Key]) -> list[str]:
    """The parameters to which some ports belong."""
    return [str(port.of) for port in values if isinstance(port, Port)]


class Accumulator:
    """Runs steps of several batches on the weights of an engine.

    ``states`` (weights, slots) and ``buffers`` (running statistics) belong to the engine, the sums
    of gradients to this class. The engine updates the parameters of which it passes ``gradients``,
    memory for the gradients with penalties and transforms. With ``only``, it updates these parameters,
    and other processes update the others.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        columns: Sequence[TensorSpec],
        states: Sequence[Twins],
        buffers: Twins,
        frozen: Callable[[Key], Value],
        gradients: Mapping[Key, Value],
        only: Collection[str] | None = None,
    ) -> None:
        self._problem, self._device, self._columns = problem, device, columns
        self._states, self._buffers = states, buffers
        self.bind = partial(bind_program, device, problem.threads, frozen)
        weights = {n: problem.model.initializer(n) for n in problem.parameters}
        batch = {n: device.empty(a.shape, a.dtype) for n, a in weights.items()}
        self._moving = update_program(problem, names_of(gradients), only)
        summed = None
        if only is not None:
            summed = names_of(p for p in self._moving.takes if getattr(p, "role", "") == "gradient")
        self._sum = GradientSum(problem, device, batch, self.bind, summed)
        self._hosts = HostVector(self._moving, device, problem.constants())
        self._penalty: Scalar | None = None
        self._outputs = dict(gradients)
        cost = self._moving.gives.get(_PENALTY)
        if cost is not None:
            self._outputs[_PENALTY] = device.empty([], cost.numpy)
            self._penalty = Scalar(device, self._outputs[_PENALTY])
        self._exchange: GradientExchange | None = None
        if problem.peers is not None:
            running, costs = buffers.read(), len(problem.terms)
            moves = statistics_moves(problem, problem.predicted)
            self._exchange = GradientExchange(problem.peers, weights, costs, running, moves)
            self._shares: dict[Key, Value] = {
                share_port(k, name): device.empty(running[name].shape, running[name].dtype)
                for k, (name, _) in enumerate(moves)
            }
            self._direct = self._sum.share(self._exchange)
            if not self._direct:
                own = self._sum.twins.values
                self._exchange.sums = {n: a for n, a in self._exchange.sums.items() if n in own}
        self._movers: dict[tuple[int, int], Binder] = {}
        self._plans = PlanCache[_BoundGradient]()
        self.programs: dict[str, Program] = {"update": self._moving, "add": self._sum.program}

    def binders(self) -> list[Binder]:
        plans = (b for p in self._plans for b in p.binders())
        return [*self._movers.values(), *self._sum.binders.values(), *plans]

    def run(self, batches: Sequence[Batch], rate: float, step: int) -> tuple[float, ...]:
        """One step, its number counted from 1; returns loss, penalty, and each of several losses."""
        factors = self._problem.scales(total_denominators(batches))
        first = (step - 1) * self._problem.updating.accumulate + 1
        loss, each = 0.0, [0.0] * len(factors)
        gather = self._gather if self._exchange is None else self._gather_from_all
        for totals in gather(batches, factors, first):
            parts = [t * f for t, f in zip(totals, factors.values(), strict=True)]
            loss += sum(parts)
            each = [before + part for before, part in zip(each, parts, strict=True)]
        old, at = self._states[0].current, self._sum.twins.current
        if (old, at) not in self._movers and self._moving.gives:
            self._movers[old, at] = self._mover(old, at)
        self._hosts.update({_RATE: rate, _COUNTER: step})
        if self._moving.gives:
            self._movers[old, at].run()
        for twins in self._states:
            twins.current = 1 - old
        penalty = 0.0 if self._penalty is None else self._penalty.read()
        return (loss, penalty, *each) if len(each) > 1 else (loss, penalty)

    def _gather(
        self, batches: Sequence[Batch], factors: Mapping[str, float], first: int
    ) -> Iterator[list[float]]:
        """Add the batches' gradients, whose draws are numbered from ``first``; returns their totals."""
        for k, batch in enumerate(batches):
            into = _BATCH if k else self._sum.twins.current
            yield self._plan(batch).run(self, batch, factors, into, first + k)
            if k:
                self._sum.add()

    def _gather_from_all(
        self, batches: Sequence[Batch], factors: Mapping[str, float], first: int
    ) -> Iterator[list[float]]:
        """The same, including the gradients that other processes compute."""
        exchange, device = self._exchange, self._device
        assert exchange is not None
        exchange.statistics.update(self._buffers.read())
        for start, own, present in exchange.peers.rounds(len(batches)):
            if own is not None:
                batch = batches[own]
                totals = self._plan(batch).run(self, batch, factors, _BATCH, first + own)
                exchange.costs[:] = totals
                read_into(device, self._sum.batch, exchange.own)
                shares = dict(enumerate(self._shares.values()))
                read_into(device, shares, exchange.shares)
            yield from exchange.add(start, present)
        if not self._direct:
            self._sum.twins.write(exchange.sums, "sum")
        self._buffers.write(exchange.statistics, "buffer")

    def statistics(self) -> dict[Key, Value]:
        """The memory for the running statistics of a batch's graph, or for its contribution to them."""
        if self._exchange is not None:
            return self._shares
        return self._buffers.at_ports(1 - self._buffers.current)

    def gradients(self, into: int) -> dict[Key, Value]:
        """The memory for a batch's gradient, by ports."""
        if into == _BATCH:
            return {Port("gradient", of=n): value for n, value in self._sum.batch.items()}
        return self._sum.twins.at_ports(into)

    def _plan(self, batch: Batch) -> _BoundGradient:
        key = tuple(batch.shape(s.name) for s in self._columns if s.name in batch.columns)
        return self._plans.get(
            key, lambda: _BoundGradient(self, self._gradient_program(batch.size), batch)
        )

    def _gradient_program(self, size: int) -> Program:
        usual = size == self._problem.batch_size
        name = "gradient" if usual else "gradient-any-rows"
        if name not in self.programs:
            self.programs[name] = gradient_program(
                self._problem, rows=size if usual else None, rounds=rounds_short_types(self._device)
            )
        return self.programs[name]

    def _mover(self, old: int, at: int) -> Binder:
        before = self._sum.twins.at_ports(at)
        after = dict(self._outputs)
        for twins in self._states:
            before |= twins.at_ports(old)
            after |= twins.at_ports(1 - old)
        return self.bind(self._moving, self._hosts, before, after)


class _BoundGradient:
    """The gradient of batches of one shape."""

    def __init__(self, owner: Accumulator, program: Program, batch: Batch) -> None:
        problem, device = owner._problem, owner._device
        self._program = program
        self._ports = problem.column_ports
        read = [c for c in owner._columns if self._ports[c.name] in program.takes]
        self._data = DataBuffers(device, read, batch)
        self._hosts = HostVector(program, device, problem.constants())
        totals = {t.total_port: program.gives[t.total_port] for t in problem.terms}
        self._costs: dict[Key, Value] = {k: device.empty([], s.numpy) for k, s in totals.items()}
        self._totals = [Scalar(device, v) for v in self._costs.values()]
        self._workspace = Workspace(program, device, problem.threads)
        self._binders: dict[tuple[int, ...], Binder] = {}

    def run(
        self, owner: Accumulator, batch: Batch, factors: Mapping[str, float], into: int, draw: int
    ) -> list[float]:
        """Compute the batch's gradient; returns the totals."""
        self._data.fill(batch)
        self._hosts.update({**factors, _DRAW: draw})
        buffers = owner._buffers
        now = (owner._states[0].current, buffers.current, into)
        if now not in self._binders:
            self._binders[now] = self._bind(owner, now[0], into)
        self._binders[now].run()
        if owner._exchange is None:
            buffers.current = 1 - buffers.current
        return [total.read() for total in self._totals]

    def binders(self) -> list[Binder]:
        return list(self._binders.values())

    def _bind(self, owner: Accumulator, old: int, into: int) -> Binder:
        before: dict[Key, Value] = {self._ports[n]: v for n, v in self._data.values.items()}
        for twins in owner._states:
            before |= twins.at_ports(old)
        before |= owner._buffers.at_ports(owner._buffers.current)
        after = {**self._costs, **owner.gradients(into), **owner.statistics()}
        binder = owner.bind(self._program, self._hosts, before, after)
        self._workspace.bind(binder)
        return binder
