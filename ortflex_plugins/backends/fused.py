"""The whole training step as one graph of standard operators, on any onnxruntime.

Forward, loss, backward, penalty and update are one graph, run once a step. Weights and optimizer
state exist in two versions; the graph reads one and writes the other, and two ready-made sets of
bindings take turns, so that nothing is bound or copied between steps. Where a step is so short that
starting a run would show, a graph holds several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core.binder import Binder, HostVector
from ortflex_core.data import Batch, Block
from ortflex_core.errors import GraphError, NoGradientRule, NotDifferentiable
from ortflex_core.evaluate import Evaluator
from ortflex_core.identity import problem_key
from ortflex_core.modes import buffer_value
from ortflex_core.problem import Problem
from ortflex_core.program import Program
from ortflex_core.protocols import Backend, Device, Losses, Value
from ortflex_core.runtime import Runtime
from ortflex_core.session import session, shared_program
from ortflex_core.step import step_program
from ortflex_core.types import Array, TensorSpec
from ortflex_plugins.backends.accumulating import Accumulator, split
from ortflex_plugins.backends.buffers import ReadLosses, Twins, averaged, scales, start_average

# What starting a run costs in terms of the nodes of a graph, how many times that a run should last,
# and how many nodes of unrolled steps are worth their compilation. From measurements of small
# networks on one thread.
_NODES_PER_RUN = 25
_SHARE = 60
_MOST_NODES = 1000
_FLOPS_PER_NODE = 30_000

_REFUSALS = (NoGradientRule, NotDifferentiable, GraphError)


def _steps(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError(
            f"FusedBackend.steps_per_run must be 'auto' or an integer >= 1, got {value!r}"
        )


@attrs.frozen(kw_only=True)
class FusedBackend(Backend):
    """Train on any onnxruntime, inference builds included: one graph, one run a step.

    Any loss, penalty and optimizer works; every operator between a parameter and a loss needs a
    gradient rule (``ortflex.gradients``). ``steps_per_run`` is how many steps one graph holds;
    ``"auto"`` chooses by the size of a step (never by a clock), and any value gives the same weights
    to float32 rounding.

    Raises:
        ValueError: ``steps_per_run`` is neither "auto" nor a positive integer.

    Example:
        >>> FusedBackend(steps_per_run=4).steps_per_run
        4
    """

    name: ClassVar[str] = "fused"
    priority: ClassVar[int] = 30

    steps_per_run: int | Literal["auto"] = attrs.field(default="auto", validator=_steps)

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """Any onnxruntime will do."""
        return []

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        try:
            _shared(problem, 1, problem.batch_size)
        except _REFUSALS as error:
            return [str(error)]
        return []

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> FusedEngine:
        return FusedEngine(problem, device, self.steps_per_run)


def _shared(problem: Problem, steps: int = 1, rows: int | None = None) -> Program:
    """The step graph of all problems of this structure; ``rows`` None is for batches of any size."""
    key = ("step", problem_key(problem), steps, rows)
    return shared_program(key, lambda: step_program(problem, steps=steps, rows=rows))


def steps_per_run(problem: Problem, nodes: int) -> int:
    """How many steps a graph should hold: so many that starting a run is a small part of it.

    A step is counted in nodes, its arithmetic (6 operations a weight and row) being worth so many
    nodes. Of the numbers that are not too large the one with the fewest runs an epoch is taken.
    The result only depends on the problem.
    """
    weights = sum(problem.model.initializer(n).size for n in problem.parameters)
    work = nodes + 6 * weights * problem.batch_size / _FLOPS_PER_NODE
    most = max(1, min(int(_SHARE * _NODES_PER_RUN / work), _MOST_NODES // nodes, 32))
    whole = problem.epoch_steps
    if whole is None:
        return most
    # An epoch is whole // k runs of k steps, and whole % k of one.
    return min(range(1, most + 1), key=lambda k: (whole // k + whole % k, k))


class _Plan:
    """A program and its bindings for batches of one shape, in both directions."""

    def __init__(
        self, engine: FusedEngine, program: Program, batch: Batch | Block, steps: int
    ) -> None:
        device = engine.device
        self.program = program
        self.steps = steps
        self.hosts = HostVector(program, device, engine.problem.constants())
        self.place = device.ort_device()
        used = {i.name for i in program.inputs}
        first = "@0" if steps > 1 else ""
        self.data: list[tuple[str, Value, Array, bool]] = []
        self._known: dict[str, tuple[Value, int]] = {}
        for spec in engine.columns:
            if spec.name + first not in used:
                continue
            shape = batch.shape(spec.name)
            value = device.empty((steps * shape[0], *shape[1:]), spec.numpy)
            view = device.view(value)
            staged = np.empty((steps * shape[0], *shape[1:]), spec.numpy) if view is None else view
            self.data.append((spec.name, value, staged, view is None))
            size = int(np.prod(shape)) * spec.numpy.itemsize
            for k in range(steps):
                name = f"{spec.name}@{k}" if steps > 1 else spec.name
                self._known[name] = (value, value.data_ptr() + k * size)
        terms = [o for o in program.outputs if not o.name.startswith("new/")]
        self.costs = device.empty([len(terms)], terms[0].numpy)
        self.costs_view = device.view(self.costs)
        item = terms[0].numpy.itemsize
        self._costs = {
            o.name: (self.costs, self.costs.data_ptr() + k * item) for k, o in enumerate(terms)
        }
        names = [o.name for o in terms]
        per_step = [f"@{k}" for k in range(steps)] if steps > 1 else [""]
        self.totals = np.array(
            [[names.index(f"total/{t.index}{s}") for t in engine.problem.terms] for s in per_step]
        )
        self.penalties = [names.index(f"penalty{s}") for s in per_step if f"penalty{s}" in names]
        self.binders = (self._bind(engine, batch, 0), self._bind(engine, batch, 1))
        self.suffixes = per_step
        self.counts_steps = any(v.startswith("step") for v in self.hosts.varying)
        self.rates: Sequence[float] | None = None
        self.denominators: Sequence[Sequence[float]] | None = None
        self.values: dict[str, float] = {}
        self.factors: Array = np.zeros(self.totals.shape)

    def _bind(self, engine: FusedEngine, batch: Batch | Block, old: int) -> Binder:
        binder = Binder(session(self.program, engine.device, engine.problem.threads), "step")
        before, after = engine.versions(old), engine.versions(1 - old)
        sizes = {
            f"{spec.name}{'@' + str(k) if self.steps > 1 else ''}": batch.shape(spec.name)
            for spec in engine.columns
            for k in range(self.steps)
        }
        for spec in self.program.inputs:
            if spec.name in self._known:
                owner, pointer = self._known[spec.name]
                exact = attrs.evolve(spec, shape=sizes[spec.name])
                binder.input_at(exact, owner, self.place, pointer)
            else:
                value = before.get(spec.name)
                if value is None:
                    value = engine.evaluator.frozen(spec.name)
                binder.input_at(spec, value, self.place, value.data_ptr())
        binder.hosts(self.hosts)
        for spec in self.program.outputs:
            if spec.name in self._costs:
                owner, pointer = self._costs[spec.name]
                binder.output_at(spec, owner, self.place, pointer)
            else:
                value = after[spec.name.removeprefix("new/")]
                binder.output_at(spec, value, self.place, value.data_ptr())
        return binder

    def fill(self, device: Device, batches: Batch | Block) -> None:
        """Copy the rows of all steps to where the graph reads them."""
        for name, value, staged, copied in self.data:
            batches.copy(name, staged)
            if copied:
                device.write(value, staged)


class _Losses:
    """The totals of one run's steps; scaled when somebody asks."""

    __slots__ = ("_costs", "_factors", "_plan")

    def __init__(self, plan: _Plan, costs: Array) -> None:
        self._plan = plan
        self._costs = costs
        self._factors = plan.factors

    def read(self) -> list[tuple[float, float]]:
        """(loss, penalty) per step."""
        plan, costs = self._plan, self._costs
        if plan.steps == 1:  # a hook may wait for it, and for so few numbers arrays are slow
            pairs = zip(plan.totals[0].tolist(), self._factors[0].tolist(), strict=True)
            loss = sum(costs.item(k) * factor for k, factor in pairs)
            return [(loss, costs.item(plan.penalties[0]) if plan.penalties else 0.0)]
        losses = (costs[plan.totals] * self._factors).sum(axis=1).tolist()
        if not plan.penalties:
            return [(loss, 0.0) for loss in losses]
        return list(zip(losses, costs[plan.penalties].tolist(), strict=True))


class _Several:
    """The losses of several runs."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[_Losses]) -> None:
        self._parts = parts

    def read(self) -> list[tuple[float, float]]:
        """(loss, penalty) per step."""
        return [pair for part in self._parts for pair in part.read()]


class FusedEngine:
    """A compiled problem in one graph (see :class:`ortflex_core.protocols.Engine`)."""

    def __init__(
        self, problem: Problem, device: Device, steps: int | Literal["auto"] = "auto"
    ) -> None:
        self.problem = problem
        self.device = device
        model = problem.model
        self._weights = Twins(device, {n: model.initializer(n) for n in problem.parameters})
        self._slots = Twins(device, problem.slot_values())
        self._buffers = Twins(device, {n: buffer_value(problem, n) for n in problem.buffers})
        self._twins = (self._weights, self._slots, self._buffers)
        self._step = self._kept_step = 0
        self.evaluator = Evaluator(problem, device)
        labels = [t.label for t in problem.terms]
        weights = [t.weight for t in problem.terms if t.weight is not None]
        columns: dict[str, TensorSpec] = {s.name: s for s in (*model.inputs, *labels, *weights)}
        self.columns = tuple(columns.values())
        self._programs: dict[tuple[int, int | None], Program] = {}
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._last: tuple[Any, int, int, _Plan] | None = None
        self._accumulator: Accumulator | None = None
        if problem.updating.accumulate > 1:
            self._accumulator, steps = self._accumulating(), 1
        if steps == "auto":
            steps = steps_per_run(problem, self._program(1, problem.batch_size).nodes)
        self.steps_per_run = steps

    def _program(self, steps: int, rows: int | None) -> Program:
        key = (steps, rows)
        if key not in self._programs:
            self._programs[key] = _shared(self.problem, steps, rows)
        return self._programs[key]

    def _sized(self, steps: int, rows: int) -> Program:
        """The graph for batches of so many rows.

        The usual batch gets one of constant sizes; odd ones share a dynamic one, where what the
        model does can be differentiated without knowing the sizes.
        """
        if rows == self.problem.batch_size:
            return self._program(steps, rows)
        try:
            return self._program(steps, None)
        except _REFUSALS:
            return self._program(steps, rows)

    def versions(self, which: int) -> dict[str, Value]:
        """One of the two versions of everything a step updates."""
        out: dict[str, Value] = {}
        for twins in self._twins:
            out |= twins.versions[which]
        return out

    def _plan(self, batch: Batch | Block, steps: int) -> _Plan:
        last = self._last
        if last is not None and last[0] is batch.columns and last[1:3] == (batch.size, steps):
            return last[3]
        shapes = tuple(batch.shape(s.name) for s in self.columns if s.name in batch.columns)
        key = (steps, shapes)
        if key not in self._plans:
            self._plans[key] = _Plan(self, self._sized(steps, batch.size), batch, steps)
        self._last = (batch.columns, batch.size, steps, self._plans[key])
        return self._plans[key]

    def _accumulating(self) -> Accumulator:
        states, frozen = (self._weights, self._slots), self.evaluator.frozen
        return Accumulator(self.problem, self.device, self.columns, states, self._buffers, frozen)

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Losses:
        if self._accumulator is not None:
            out = []
            size = self.problem.updating.accumulate
            for parts, rate in zip(split(batches, len(rates), size), rates, strict=True):
                out.append(self._accumulator.run(parts, rate, self._step + 1))
                self._step += 1
            return ReadLosses(out)
        if isinstance(batches, Block) and len(batches) == self.steps_per_run:
            return self._run(batches, len(batches), batches.denominators, rates)
        if len(batches) == 1:
            return self._run(batches[0], 1, [batches[0].denominators], rates)
        singles = zip(batches, rates, strict=True)
        return _Several([self._run(b, 1, [b.denominators], [rate]) for b, rate in singles])

    def _run(
        self,
        batches: Batch | Block,
        steps: int,
        denominators: Sequence[Sequence[float]],
        rates: Sequence[float],
    ) -> _Losses:
        plan = self._plan(batches, steps)
        plan.fill(self.device, batches)
        # Whole batches of unweighted data share their denominators, and a constant rate its list.
        if plan.counts_steps or plan.rates is not rates or plan.denominators != denominators:
            self._set_hosts(plan, denominators, rates)
        now = self._weights.current
        plan.binders[now].run()
        for twins in self._twins:
            twins.current = 1 - now
        self._step += steps
        view = plan.costs_view
        return _Losses(plan, self.device.read(plan.costs) if view is None else view.copy())

    def _set_hosts(
        self, plan: _Plan, denominators: Sequence[Sequence[float]], rates: Sequence[float]
    ) -> None:
        values = plan.values
        if plan.denominators != denominators:
            factors = [scales(self.problem, d) for d in denominators]
            for suffix, known in zip(plan.suffixes, factors, strict=True):
                values.update({name + suffix: value for name, value in known.items()})
            plan.factors = np.array([list(known.values()) for known in factors])
            plan.denominators = denominators
        for k, (suffix, rate) in enumerate(zip(plan.suffixes, rates, strict=True)):
            values[f"rate{suffix}"] = rate
            values[f"step{suffix}"] = self._step + k + 1
        plan.rates = rates
        plan.hosts.update(values)

    @property
    def _now(self) -> dict[str, Value]:
        """What predictions are made with."""
        means = averaged(self.problem, self._slots)
        return {**self._weights.values, **self._buffers.values, **means}

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        return self.evaluator.evaluate(self._now, batch, outputs)

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        return self.evaluator.predict(self._now, batch, outputs)

    def state(self) -> dict[str, Array]:
        return self._weights.read()

    def load(self, state: Mapping[str, Array]) -> None:
        self._weights.write(state, "parameter")
        if self._accumulator is not None:
            self._accumulator.clear()
        start_average(self.problem, self._slots, state)

    def buffers(self) -> dict[str, Array]:
        return self._buffers.read()

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        self._buffers.write(buffers, "buffer")

    def slots(self) -> dict[str, Array]:
        return {**self._slots.read(), "step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        self._slots.write({k: v for k, v in slots.items() if k != "step"}, "optimizer slot")
        self._step = int(slots.get("step", self._step))

    def keep(self) -> str | None:
        bad = self._weights.not_finite()
        if bad is None:
            for twins in self._twins:
                twins.keep()
            self._kept_step = self._step
        return bad

    def back(self) -> None:
        for twins in self._twins:
            twins.back()
        self._step = self._kept_step
        if self._accumulator is not None:
            self._accumulator.clear()

    def programs(self) -> dict[str, Program | bytes]:
        graphs: dict[str, Program | bytes] = {}
        for (steps, rows), program in self._programs.items():
            label = "step" if rows is None else f"step-{rows}-rows"
            graphs[f"{label}-{steps}-at-once" if steps > 1 else label] = program
        if self._accumulator is not None:
            graphs |= self._accumulator.programs
        return graphs | {p.name: p for p in self.evaluator.programs.values()}

    def counters(self) -> dict[str, int]:
        binders = [b for plan in self._plans.values() for b in plan.binders]
        return {
            "bindings_made": sum(b.misses for b in binders),
            "bindings_reused": sum(b.hits for b in binders),
            "steps": self._step,
        }

    def close(self) -> None:
        self._plans.clear()
        self._last = None
