"""The whole training step as one graph of standard operators, on any onnxruntime.

Forward, loss, backward, penalty and update are one graph, which runs once per step. Weights and
optimizer state exist in two versions; the graph reads one and writes the other, and two prepared
sets of bindings alternate, so that nothing is bound or copied between steps. If a step is so short
that the start of a run matters, a graph has several steps. Long updates of large parameters are
computed in place, by numpy or compiled C, from gradients that the graph gives.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Backend,
    Batch,
    Block,
    Device,
    Formula,
    HostUpdates,
    Key,
    Losses,
    PlanCache,
    Port,
    Problem,
    Program,
    ReadLosses,
    Runtime,
    StateShards,
    TwinEngine,
    Twins,
    Value,
    binding_counts,
    buffer_value,
    get_program,
    host_formulas,
    missing_types,
    plans_memory,
    ports_of,
    problem_key,
    rounds_short_types,
    setting,
    step_program,
)
from ortflex_plugins.backends.accumulating import Accumulator, names_of
from ortflex_plugins.backends.device_graphs import DeviceGraphs, Wanted
from ortflex_plugins.backends.fused_plan import BoundStep, Resident
from ortflex_plugins.backends.step_plan import (
    REFUSALS,
    RunLosses,
    SeveralRuns,
    check_steps,
    fewest_runs,
    split,
)
from ortflex_plugins.c.updates import compile_update

# The cost of starting a run in nodes of a graph, the length of a run in multiples of that cost, and
# the largest number of nodes of unrolled steps; measured with small networks on one thread.
_NODES_PER_RUN = 25
_SHARE = 60
_MOST_NODES = 1000
_FLOPS_PER_NODE = 30_000


def _wanted(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value != "auto" and type(value) is not bool:
        raise ValueError(f"FusedBackend.cuda_graph must be True, False or 'auto', got {value!r}")


@attrs.frozen(kw_only=True)
class FusedBackend(Backend):
    """Trains on any build of onnxruntime, including inference builds, with one graph for the whole step.

    All losses, penalties and optimizers are supported. Every operator between a parameter and a loss
    needs a gradient rule (``ortflex.gradients``). Results are bit-identical for all values of
    ``steps_per_run``. ``"auto"`` chooses a value that depends on the amount of computation in a step,
    never on measured times.

    Parameters with at least 2¹⁸ elements are updated in place, outside the graph, if the optimizer is
    elementwise and needs more operations than SGD, as momentum, Adam and its variants do. If a C
    compiler is available, the update is compiled, so that it makes only one pass over memory;
    otherwise, numpy computes it, with bit-identical results.

    On a GPU, kernel launches dominate the duration of a short step. With ``cuda_graph="auto"``, the
    backend captures the graph of its steps as a CUDA graph and replays it, if the device supports this.
    A step that contains control flow or a node that runs on the CPU cannot be captured. The backend
    then trains without a CUDA graph and logs the reason. With ``cuda_graph=True``, it raises an error
    instead.

    Raises:
        ValueError: ``steps_per_run`` is neither "auto" nor a positive integer, or ``cuda_graph`` is not a
            boolean or "auto".

    Example:
        >>> FusedBackend(steps_per_run=4).steps_per_run
        4
    """

    name: ClassVar[str] = "fused"
    priority: ClassVar[int] = 30
    exchanges: ClassVar[bool] = True
    shards: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True

    steps_per_run: int | Literal["auto"] = setting(
        default="auto",
        validator=check_steps,
        help="the number of steps in one graph; `auto` chooses it according to the amount of "
        "computation in a step",
    )
    cuda_graph: bool | Literal["auto"] = setting(
        default=False,
        validator=_wanted,
        help="whether to use a CUDA graph: `auto` uses one if possible, and `True` requires one",
    )

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """Empty: it works with any onnxruntime."""
        return []

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        if self.cuda_graph is True and device.graph_providers() is None:
            return [
                f"cuda_graph=True needs device='cuda'; the device {device.name} cannot record runs"
            ]
        try:
            formulas = _host_formulas(problem, device, self.steps_per_run)
            _shared(_of_one_batch(problem), device, 1, problem.batch_size, formulas)
        except REFUSALS as error:
            return [str(error)]
        return missing_types(problem, device)

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> FusedEngine:
        return FusedEngine(problem, device, self.steps_per_run, self.cuda_graph)


def _shared(
    problem: Problem,
    device: Device,
    steps: int = 1,
    rows: int | None = None,
    updated_elsewhere: Collection[str] = (),
) -> Program:
    """The step graph of all problems of this structure; for batches of any size if ``rows`` is None."""
    rounds = rounds_short_types(device)
    key = ("step", problem_key(problem), steps, rows, tuple(updated_elsewhere), rounds)
    elsewhere = updated_elsewhere
    return get_program(
        key,
        lambda: step_program(
            problem, steps=steps, rows=rows, updated_elsewhere=elsewhere, rounds=rounds
        ),
    )


def _host_formulas(
    problem: Problem, device: Device, steps: int | Literal["auto"]
) -> dict[str, Formula]:
    """The updates that numpy computes: of large parameters, in memory that the host can access."""
    if steps not in ("auto", 1) or device.view(device.empty([1], np.float32)) is None:
        return {}
    return host_formulas(problem)


def _of_one_batch(problem: Problem) -> Problem:
    """The same problem without accumulation."""
    return attrs.evolve(problem, updating=attrs.evolve(problem.updating, accumulate=1))


def steps_per_run(problem: Problem, nodes: int, most_nodes: int = _MOST_NODES) -> int:
    """The number of steps in a graph, chosen so that the start of a run is a small part of it.

    ``nodes`` is the number of nodes of a step with one batch, ``most_nodes`` that of a graph. The
    length of a step is counted in nodes; its arithmetic (6 operations per weight and row) is
    converted to nodes. Among the numbers that are not too large, the one with the fewest runs per
    epoch is chosen. The result only depends on the problem.
    """
    weights = sum(math.prod(problem.shape_of(n)) for n in problem.parameters)
    together = problem.updating.accumulate
    nodes *= together
    work = nodes + 6 * weights * problem.batch_size * together / _FLOPS_PER_NODE
    most = max(1, min(int(_SHARE * _NODES_PER_RUN / work), most_nodes // nodes, 32))
    return most if problem.epoch_steps is None else fewest_runs(problem, most)


class FusedEngine(TwinEngine):
    """A compiled problem in one graph (see :class:`ortflex_core.Engine`)."""

    checks_memory = True

    def __init__(
        self,
        problem: Problem,
        device: Device,
        steps: int | Literal["auto"] = "auto",
        cuda_graph: Wanted = False,
    ) -> None:
        super().__init__(problem, device)
        self.graphs = DeviceGraphs(device, cuda_graph, problem.threads)
        model = problem.model
        formulas = _host_formulas(problem, device, steps)
        divided = problem.peers is not None and problem.peers.shards
        self.shards = StateShards(problem) if divided else None
        """The part of the state that this process keeps, if several processes divide it."""
        if self.shards is not None:
            formulas = {n: f for n, f in formulas.items() if n in self.shards.own}
        state = {n: model.initializer(n) for n in problem.parameters}
        statistics = {n: buffer_value(problem, n) for n in problem.buffers}
        # Steps of several batches run graphs whose memory onnxruntime plans.
        whole = problem.updating.accumulate == 1 and problem.peers is None
        planned = problem.recomputed is not False and whole and plans_memory(device)

        def twins(values: Mapping[str, Array], ports: Mapping[str, Port]) -> Twins:
            own = {n for n, port in ports.items() if planned or port.of in formulas}
            if self.shards is not None:  # the weights of other processes are received
                own |= {n for n, port in ports.items() if not self.shards.keeps(port)}
            return Twins(device, values, ports, own)

        self._weights = twins(state, ports_of("parameter", state))
        slots, of_slots = problem.slot_values(), problem.slot_ports
        if self.shards is not None:
            slots = {n: a for n, a in slots.items() if self.shards.keeps(of_slots[n])}
        self._slots = twins(slots, of_slots)
        self._buffers = twins(statistics, ports_of("buffer", statistics))
        self._twins = (self._weights, self._slots, self._buffers)
        self._gradients: dict[Key, Value] = {
            Port("gradient", of=n): device.empty(state[n].shape, state[n].dtype) for n in formulas
        }
        """The gradients from which numpy updates parameters."""
        self.host_updates: HostUpdates | None = None
        if formulas:
            self.host_updates = HostUpdates(problem, formulas, self._views(), compile_update)
        self._kept_step = 0
        self.columns = problem.columns
        self.resident = Resident(device, self.columns)
        self._programs: dict[tuple[int, int | None], Program] = {}
        self._plans = PlanCache[BoundStep]()
        self._last: tuple[Any, int, int, BoundStep] | None = None
        if problem.peers is not None or problem.recomputed is not False or formulas:
            steps = 1
        if steps == "auto":
            if problem.updating.accumulate == 1:
                one = self._program(1, problem.batch_size)  # listeners get the event
            else:
                one = _shared(_of_one_batch(problem), device, 1, problem.batch_size)
            steps = steps_per_run(problem, one.nodes)
        self.steps_per_run = steps
        # One batch after the other if a step is long or single, which needs the memory of one
        # batch.
        self._accumulator: Accumulator | None = None
        if problem.updating.accumulate > 1:
            self._accumulator = self._accumulating()

    def _program(self, steps: int, rows: int | None) -> Program:
        key = (steps, rows)
        if key not in self._programs:
            elsewhere = names_of(self._gradients)
            self._programs[key] = _shared(self.problem, self.device, steps, rows, elsewhere)
        return self._programs[key]

    def _views(self) -> dict[Port, Array]:
        """The memory of weights, slots and gradients that numpy reads and writes, by their ports."""
        values = {**self._weights.at_ports(0), **self._slots.at_ports(0), **self._gradients}
        views = {port: self.device.view(value) for port, value in values.items()}
        return {p: v for p, v in views.items() if isinstance(p, Port) and v is not None}

    def _sized(self, steps: int, rows: int) -> Program:
        """The graph for batches of a number of rows.

        The usual batch gets a graph of constant sizes; others share a dynamic one if the model can
        be differentiated without known sizes.
        """
        if rows == self.problem.batch_size:
            return self._program(steps, rows)
        try:
            return self._program(steps, None)
        except REFUSALS:
            return self._program(steps, rows)

    def versions(self, which: Sequence[int]) -> dict[Key, Value]:
        """One of the two versions of weights, slots and statistics each, and the gradients for numpy."""
        out = dict(self._gradients)
        for twins, version in zip(self._twins, which, strict=True):
            out |= twins.at_ports(version)
        return out

    def _plan(self, batch: Batch | Block, steps: int) -> BoundStep:
        last = self._last
        if last is not None and last[0] is batch.columns and last[1:3] == (batch.size, steps):
            return last[3]
        shapes = tuple(batch.shape(s.name) for s in self.columns if s.name in batch.columns)
        key = (steps, shapes)
        plan = self._plans.get(
            key, lambda: BoundStep(self, self._sized(steps, batch.size), batch, steps)
        )
        self._last = (batch.columns, batch.size, steps, plan)
        return plan

    def _accumulating(self) -> Accumulator:
        states, frozen = (self._weights, self._slots), self.evaluator.frozen_port
        return Accumulator(
            self.problem,
            self.device,
            self.columns,
            states,
            self._buffers,
            frozen,
            self._gradients,
            None if self.shards is None else self.shards.own,
        )

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Losses:
        size = self.problem.updating.accumulate
        several = self.steps_per_run > 1 or size == 1
        if several and isinstance(batches, Block) and len(batches) == self.steps_per_run * size:
            return self._run(batches, self.steps_per_run, batches.denominators, rates)
        if self._accumulator is not None:
            out = []
            for parts, rate in zip(split(batches, len(rates), size), rates, strict=True):
                out.append(self._accumulator.run(parts, rate, self._step + 1))
                self._update_on_host(rate)
                if self.shards is not None:
                    self.shards.exchange(self.device, self._weights.values)
                self._step += 1
            return ReadLosses(out)
        if len(batches) == 1:
            return self._run(batches[0], 1, [batches[0].denominators], rates)
        singles = zip(batches, rates, strict=True)
        return SeveralRuns([self._run(b, 1, [b.denominators], [rate]) for b, rate in singles])

    def _run(
        self,
        batches: Batch | Block,
        steps: int,
        denominators: Sequence[Sequence[float]],
        rates: Sequence[float],
    ) -> RunLosses:
        plan = self._plan(batches, steps)
        plan.fill(self.device, batches)
        plan.set_hosts(self._step, denominators, rates)
        weights, slots, buffers = self._twins
        losses = plan.run(self, (weights.current, slots.current, buffers.current))
        self._update_on_host(rates[0])
        for twins in self._twins:
            twins.current = 1 - twins.current
        self._step += steps
        return losses

    def _update_on_host(self, rate: float) -> None:
        """Update the parameters whose gradients the graph gave."""
        if self.host_updates is not None:
            self.host_updates.run(rate, self._step + 1)

    @property
    def _now(self) -> dict[str, Value]:
        return {**super()._now, **self._buffers.values}

    def buffers(self) -> dict[str, Array]:
        return self._buffers.read()

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        self._buffers.write(buffers, "buffer")

    def slots(self) -> dict[str, Array]:
        slots = super().slots()
        return slots if self.shards is None else {**self.shards.whole(slots), "step": slots["step"]}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        if self.shards is not None:
            step = {"step": slots["step"]} if "step" in slots else {}
            slots = self.shards.mine({n: a for n, a in slots.items() if n != "step"}) | step
        super().load_slots(slots)

    def serve_slots(self) -> None:
        """Send this process's part of the state while rank 0 calls :meth:`slots`."""
        assert self.shards is not None
        self.shards.serve(self._slots.read())

    def not_finite(self) -> str | None:
        return self._weights.not_finite()

    def keep(self) -> None:
        for twins in self._twins:
            twins.keep()
        self._kept_step = self._step

    def restore(self) -> None:
        for twins in self._twins:
            twins.restore()
        self._step = self._kept_step

    def programs(self) -> dict[str, Program | bytes]:
        graphs: dict[str, Program | bytes] = {}
        for (steps, rows), program in self._programs.items():
            label = "step" if rows is None else f"step-{rows}-rows"
            graphs[f"{label}-{steps}-at-once" if steps > 1 else label] = program
        if self._accumulator is not None:
            graphs |= self._accumulator.programs
        return graphs | {p.name: p for p in self.evaluator.programs.values()}

    def counters(self) -> dict[str, int]:
        binders = [b for plan in self._plans for b in plan.binders()]
        if self._accumulator is not None:
            binders += self._accumulator.binders()
        return {**binding_counts(binders), "steps": self._step}

    def close(self) -> None:
        self._plans.clear()
        self._last = None
