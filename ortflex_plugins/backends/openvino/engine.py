"""The engines of the backend ``openvino``: with the state inside, and for steps of several batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Batch,
    Binder,
    Block,
    DataError,
    Device,
    Evaluator,
    GraphError,
    HostEngine,
    HostVector,
    Key,
    Losses,
    PlanCache,
    Port,
    Problem,
    Program,
    TensorSpec,
    Value,
    array_at,
    check_state,
    first_not_finite,
    get_program,
    get_session,
    gradient_program,
    numpy_dtype,
    problem_key,
    step_program,
    update_program,
)
from ortflex_plugins.backends.epoch_runs import PortEngine, first_state
from ortflex_plugins.backends.fused import steps_per_run
from ortflex_plugins.backends.openvino.compiled import Compiled, Hints, compile_program, error_line
from ortflex_plugins.backends.openvino.draws import split_draws
from ortflex_plugins.backends.step_plan import RunLosses, SeveralRuns, StepPlan

_MOST_NODES = 200
"""Nodes of a graph of several steps: OpenVINO takes about 3 ms to compile one."""
_INT32 = np.iinfo(np.int32)


def programs_of(problem: Problem, steps: int, rows: int) -> tuple[Program, Program | None]:
    """The graph of some steps without its draws, and that of the draws; shared by structure."""

    def make() -> tuple[Program, Program | None]:
        return split_draws(step_program(problem, steps=steps, rows=rows, relu_mask="Sign"))

    return get_program(("openvino step", problem_key(problem), steps, rows), make)


def usual_steps(problem: Problem) -> int:
    """The number of steps in a graph: several if a step is short."""
    nodes = programs_of(problem, 1, problem.batch_size)[0].nodes
    return steps_per_run(problem, nodes, _MOST_NODES)


def check_problem(problem: Problem, hints: Hints, steps: int | None = None) -> None:
    """Compile the program for full batches, if the shapes of their data are known.

    Raises:
        Unsupported: what OpenVINO cannot do.
    """
    rows = problem.batch_size
    if problem.updating.accumulate > 1:
        alone = gradient_program(problem, rows=rows, relu_mask="Sign")
        programs = [split_draws(alone)[0], update_program(problem)]
    else:
        steps = usual_steps(problem) if steps is None else steps
        programs = [programs_of(problem, steps, rows)[0]]
    ports = problem.column_ports
    known: dict[Key, tuple[int, ...]] = {}
    for spec in problem.columns:
        rest = [d for d in (spec.shape or ("batch",))[1:] if isinstance(d, int)]
        if spec.shape is None or len(rest) < len(spec.shape) - 1:
            return  # sizes that depend on the data: known with the first batch
        for step in range(steps or 1):
            known[attrs.evolve(ports[spec.name], step=step)] = (rows, *rest)
    for program in programs:
        own = {k: s for k, s in known.items() if k in program.takes}
        compile_program(program, own, threads=problem.threads, hints=hints)


class CompiledStep(StepPlan):
    """A compiled graph of steps, and a request that has the memory of its data and a state."""

    def __init__(self, engine: OpenVinoEngine, batch: Batch | Block, steps: int) -> None:
        problem, device = engine.problem, engine.device
        program, draws = programs_of(problem, steps, batch.size)
        super().__init__(problem, device, problem.columns, program, batch, steps)
        shapes = {k: _sizes(exact) for k, (exact, _, _) in self.places.items()}
        self.compiled = compile_program(
            program, shapes, threads=problem.threads, hints=engine.hints
        )
        self._wide = [(n, a) for n, _, a, _ in self.data if a.dtype in (np.int64, np.uint32)]
        self._drawn: dict[Key, Array] = {}
        self._draw: tuple[HostVector, Binder] | None = None
        if draws is not None:
            self._draw = self._drawing(draws, device)
            self.counts_steps = True
        self._request = self._bind(engine, self.compiled)
        self._states = {s.name: s for s in self._request.query_state()}
        if lost := set(self.compiled.states.values()) - set(self._states):
            raise GraphError(f"OpenVINO did not keep the state {min(lost)!r}; use backend='fused'")

    def _drawing(self, draws: Program, device: Device) -> tuple[HostVector, Binder]:
        hosts = HostVector(draws, device, self.problem.constants())
        binder = Binder(get_session(draws, device, self.problem.threads), draws.name)
        binder.hosts(hosts)
        for key, spec in draws.gives.items():
            value = device.empty(_sizes(spec), spec.numpy)
            binder.output(spec.name, value)
            self._drawn[key] = _view(device, value)
        return hosts, binder

    def _bind(self, engine: OpenVinoEngine, compiled: Compiled) -> Any:
        request, program = compiled.request(), self.program
        for key, spec in program.takes.items():
            if key in compiled.states:
                continue
            if key in self.places:
                _, column, k = self.places[key]
                whole = self.data[column][2]
                size = len(whole) // self.batches
                array = whole[k * size : (k + 1) * size]
            elif key in self._drawn:
                array = self._drawn[key]
            else:
                array = engine.array(key).reshape(_sizes(spec))
            _set(request, spec.name, array)
        for name, dtype, address in self.hosts.places():
            _set(request, name, array_at(address, (), numpy_dtype(dtype), self.hosts))
        self._paid = np.zeros(len(self.costs), next(iter(self.costs.values())).numpy)
        for k, spec in enumerate(self.costs.values()):
            _set(request, spec.name, self._paid[k : k + 1].reshape(_sizes(spec)))
        for key, spec in program.gives.items():
            if key not in self.costs and key not in compiled.states:
                # A new value that does not depend on the old one.
                _set(request, spec.name, engine.array(key).reshape(_sizes(spec)))
        return request

    def fill(self, device: Device, batches: Batch | Block) -> None:
        super().fill(device, batches)
        for name, array in self._wide:
            if array.size and not (array.min() >= _INT32.min and array.max() <= _INT32.max):
                raise DataError(
                    f"the backend openvino computes with 32-bit integers, and {name!r} has the value "
                    f"{max(array.max(), array.min(), key=abs)}; use backend='fused'"
                )

    def run(self) -> RunLosses:
        """Run the steps from the state inside."""
        if self._draw is not None:
            hosts, binder = self._draw
            hosts.update(self.values)
            binder.run()
        _infer(self._request)
        return RunLosses(self, self._paid.copy())

    def put(self, arrays: Mapping[Key, Array]) -> None:
        """Set the state inside."""
        import openvino

        for key, name in self.compiled.states.items():
            array = arrays[key].reshape(_sizes(self.program.takes[key]))
            self._states[name].state = openvino.Tensor(array, shared_memory=True)

    def take(self, arrays: Mapping[Key, Array]) -> None:
        """Copy the state inside."""
        for key, name in self.compiled.states.items():
            np.copyto(arrays[key], self._states[name].state.data.reshape(arrays[key].shape))


class OpenVinoEngine(PortEngine):
    """A compiled problem on OpenVINO (see :class:`ortflex_core.Engine`).

    The state is inside the request of the plan that ran last; if another plan runs, or the state is
    requested, it is copied to memory that onnxruntime also reads.
    """

    def __init__(
        self, problem: Problem, device: Device, hints: Hints, steps: int | None = None
    ) -> None:
        super().__init__(problem, device)
        self.hints = hints
        self._values: dict[Key, Value] = {
            key: device.put(array) for key, array in first_state(problem).items()
        }
        self._arrays = {key: _view(device, value) for key, value in self._values.items()}
        self._plans: dict[Any, CompiledStep] = {}
        self._inside: CompiledStep | None = None
        """The plan with the current state; None if only the arrays have it."""
        self._known = True
        """Whether the arrays have the current state."""
        self._kept: dict[Key, Array] = {}
        self._kept_step = 0
        self.steps_per_run = usual_steps(problem) if steps is None else steps

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Losses:
        if isinstance(batches, Block) and len(batches) == len(rates) > 1:
            return self._run(batches, len(rates), batches.denominators, rates)
        parts = [
            self._run(batch, 1, [batch.denominators], [rate])
            for batch, rate in zip(batches, rates, strict=True)
        ]
        return parts[0] if len(parts) == 1 else SeveralRuns(parts)

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
        if plan is not self._inside:
            self._fetch()
            plan.put(self._arrays)
            self._inside = plan
        self._known = False
        losses = plan.run()
        self._step += steps
        self._runs += 1
        return losses

    def _plan(self, batch: Batch | Block, steps: int) -> CompiledStep:
        shapes = tuple(batch.shape(s.name) for s in self.problem.columns if s.name in batch.columns)
        if (steps, shapes) not in self._plans:
            self._plans[steps, shapes] = CompiledStep(self, batch, steps)
        return self._plans[steps, shapes]

    def array(self, key: Key) -> Array:
        """The memory of a tensor that a step reads: of the state, or of the model."""
        if key in self._arrays:
            return self._arrays[key]
        return _view(self.device, self.evaluator.frozen_port(key))

    def _fetch(self) -> None:
        """Copy the state to the arrays."""
        if self._inside is not None and not self._known:
            self._inside.take(self._arrays)
        self._known = True

    @property
    def _now(self) -> dict[str, Value]:
        self._fetch()
        ports = self._parameters | self._statistics
        if self.problem.updating.average is not None:
            slots = self.problem.slot_ports
            ports |= {n: slots[key] for n, key in self.problem.average_keys.items()}
        return {name: self._values[port] for name, port in ports.items()}

    def _read(self, ports: Mapping[str, Port]) -> dict[str, Array]:
        self._fetch()
        return {name: self._arrays[port].copy() for name, port in ports.items()}

    def _write(self, given: Mapping[str, Array], ports: Mapping[str, Port], what: str) -> None:
        check_state(given, {n: self._arrays[p].shape for n, p in ports.items()}, what)
        self._fetch()
        self._inside = None
        for name, array in given.items():
            self._arrays[ports[name]][...] = array

    def not_finite(self) -> str | None:
        self._fetch()
        return first_not_finite({n: self._arrays[p] for n, p in self._parameters.items()})

    def keep(self) -> None:
        self._fetch()
        for key, array in self._arrays.items():
            self._kept.setdefault(key, np.empty_like(array))[...] = array
        self._kept_step = self._step

    def restore(self) -> None:
        self._inside, self._known = None, True
        for key, array in self._kept.items():
            self._arrays[key][...] = array
        self._step = self._kept_step

    def programs(self) -> dict[str, Program | bytes]:
        # The step of a full batch is there before the first one runs: for graph_built.
        whole = programs_of(self.problem, 1, self.problem.batch_size)[0]
        graphs: dict[str, Program | bytes] = {"step": whole}
        for (steps, _), plan in self._plans.items():
            rows = plan.data[0][2].shape[0] // plan.batches
            label = "step" if rows == self.problem.batch_size else f"step-{rows}-rows"
            graphs[f"{label}-{steps}-at-once" if steps > 1 else label] = plan.program
        return graphs | {p.name: p for p in self.evaluator.programs.values()}

    def close(self) -> None:
        self._fetch()
        self._inside = None
        self._plans.clear()


class AccumulatingEngine(HostEngine):
    """Steps of several batches: one graph computes a batch's gradient, another updates the weights.

    The state is in arrays, because two requests use it.
    """

    def __init__(self, problem: Problem, device: Device, hints: Hints) -> None:
        self._device, self._hints = device, hints
        self._evaluator = Evaluator(problem, device)
        self._requests = PlanCache[tuple[Program, Any, Program | None]]()
        super().__init__(problem, self._on_openvino)

    def gradient_graph(self, rows: int) -> Program:
        key = ("openvino gradient", problem_key(self.problem), rows)
        make = lambda: gradient_program(self.problem, rows=rows, relu_mask="Sign")  # noqa: E731
        return get_program(key, make)

    def _on_openvino(self, program: Program, feeds: Mapping[str, Array]) -> dict[str, Array]:
        threads = self.problem.threads
        shapes = {k: feeds[s.name].shape for k, s in program.takes.items() if s.name in feeds}

        def make() -> tuple[Program, Any, Program | None]:
            rest, draws = split_draws(program)
            taken = {key: shapes[key] for key in rest.takes if key in shapes}
            compiled = compile_program(
                rest, taken, threads=threads, hints=self._hints, stateful=False
            )
            return rest, compiled.request(), draws

        # Batches of one training may have several shapes, and what is compiled has fixed ones.
        rest, request, draws = self._requests.get((program, tuple(shapes.items())), make)
        given = dict(feeds)
        if draws is not None:
            hosts = {h.spec.name: feeds[h.spec.name] for h in draws.hosts}
            session = get_session(draws, self._device, threads)
            names = [s.name for s in draws.outputs]
            for name, array in zip(names, session.run(names, hosts), strict=True):
                given[rest.takes[name].name] = array
        for name in (*(s.name for s in rest.inputs), *(h.spec.name for h in rest.hosts)):
            # OpenVINO shares writable memory, but does not keep it alive.
            given[name] = np.require(given[name], requirements=["C", "W"])
            _set(request, name, given[name])
        _infer(request)
        return {s.name: np.array(request.get_tensor(s.name).data) for s in rest.outputs}

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        return self._evaluator.evaluate(self._now, batch, outputs)

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        return self._evaluator.predict(self._now, batch, outputs)

    @property
    def _now(self) -> dict[str, Value]:
        return {name: self._device.put(array) for name, array in self.averages().items()}


def _infer(request: Any) -> None:
    try:
        request.infer()
    except RuntimeError as error:
        raise GraphError(f"OpenVINO could not run the step: {error_line(error)}") from error


def _set(request: Any, name: str, array: Array) -> None:
    """Let a request read or write an array, which must not move."""
    import openvino

    request.set_tensor(name, openvino.Tensor(array, shared_memory=True))


def _view(device: Device, value: Value) -> Array:
    view = device.view(value)
    assert view is not None, "only the device cpu is supported"
    return view


def _sizes(spec: TensorSpec) -> tuple[int, ...]:
    """The sizes of a tensor, all of them known."""
    return tuple(d if isinstance(d, int) else 0 for d in spec.shape or ())
