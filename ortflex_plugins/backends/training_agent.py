"""onnxruntime's TrainingAgent: the runtime runs forward and backward, our graphs do the rest.

One step is: the model's forward pass; one graph for loss and its gradient; the model's backward
pass; one graph for the penalty, if there is one, and the update of all weights. Every tensor
between them lives in a buffer that is bound once, including the agent's outputs: preallocated
buffers are faster than its own allocation, and without them its backward pass reuses the memory of
the predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import add
from typing import Any, ClassVar

import attrs

from ortflex_core import (
    Array,
    Batch,
    Binder,
    DataBuffers,
    Device,
    GradientExchange,
    GraphError,
    HostVector,
    Key,
    LayerBackend,
    Model,
    PlanCache,
    Port,
    Problem,
    Program,
    ReadLosses,
    Rewrite,
    Runtime,
    Scalar,
    Scales,
    TwinEngine,
    Twins,
    Unsupported,
    Value,
    binding_counts,
    error_reason,
    forward_program,
    install_command,
    keep_alive,
    loss_ports,
    loss_program,
    ports_of,
    read_into,
    session_options,
    update_program,
)
from ortflex_plugins.backends import ort_gradients
from ortflex_plugins.backends.accumulating import GradientSum, bind_program, total_denominators
from ortflex_plugins.backends.step_plan import split

_RATE, _COUNTER = (Port(role).label for role in ("rate", "counter"))
_LOSS, _PENALTY = Port("loss"), Port("penalty")


@attrs.frozen(kw_only=True)
class TrainingAgentBackend(LayerBackend):
    """Trains with the TrainingAgent of onnxruntime-training 1.16 and 1.19.

    All losses, penalties and optimizers are supported, except losses that train tensors of their own,
    such as the projection of ``feature_matching``. The operators of the model must be among those that
    onnxruntime's gradient builder differentiates correctly, which is checked before training.

    Example:
        >>> trainer = Trainer("model.onnx", backend="training_agent")  # doctest: +SKIP
    """

    name: ClassVar[str] = "training_agent"
    priority: ClassVar[int] = 10
    exchanges: ClassVar[bool] = True

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        if runtime.has_training_agent:
            return []
        return [
            f"{runtime} has no TrainingAgent; "
            f"in a separate environment, {install_command('agent')} (or session)"
        ]

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        reasons = self.available(runtime) or ort_gradients.reasons(problem, runtime)
        if not reasons and problem.model.loss_parameters:
            # The agent's backward pass takes no gradient of a parameter itself.
            own = ", ".join(problem.model.loss_parameters)
            reasons.append(f"TrainingAgent cannot train the tensors of a loss: {own}")
        return reasons

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> TrainingAgentEngine:
        return TrainingAgentEngine(problem, device, runtime)

    def replacing(self, model: Model, wrt: Sequence[str], outputs: Sequence[str]) -> Rewrite:
        return ort_gradients.replacing(model, wrt, outputs)

    def passes(
        self, program: Program, wrt: Sequence[str], device: Device, runtime: Runtime, threads: int
    ) -> Agent:
        names = [o.name for o in program.outputs]
        obstacles = ort_gradients.obstacles(program.proto(), wrt, names, runtime, updates=False)
        if obstacles:
            raise Unsupported("\n".join(o.text for o in obstacles))
        return Agent(program, wrt, device, threads)


class Agent:
    """The runtime's TrainingAgent on one program, whose parameters are inputs with gradients."""

    def __init__(
        self, program: Program, parameters: Sequence[str], device: Device, threads: int
    ) -> None:
        import onnxruntime
        from onnxruntime.capi import _pybind_state as state

        config = state.OrtModuleGraphBuilderConfiguration()
        config.initializer_names = []
        config.initializer_names_to_train = []
        config.input_names_require_grad = list(parameters)
        config.build_gradient_graph = True
        builder = state.OrtModuleGraphBuilder()
        try:
            builder.initialize(program.model, config)
            builder.build(state.TrainingGraphTransformerConfiguration())
            self.model: bytes = builder.get_gradient_model()
            info = builder.get_graph_info()
            self._session = keep_alive(
                onnxruntime.InferenceSession(
                    self.model, session_options(threads), providers=device.providers()
                )
            )
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            raise GraphError(
                f"onnxruntime cannot differentiate the model: {error_reason(error)}"
            ) from error
        self.inputs = [i.name for i in self._session.get_inputs()]
        self.outputs = list(info.user_output_names)
        fixed = set(info.output_grad_indices_non_differentiable)
        self.differentiable = [n for k, n in enumerate(self.outputs) if k not in fixed]
        fetches = [o.name for o in self._session.get_outputs()]
        owner = {gradient: name for name, gradient in info.user_input_grad_names.items()}
        self.gradients = [owner[f] for f in fetches]
        missing = sorted(set(parameters) - set(self.gradients))
        if missing:
            raise Unsupported(f"onnxruntime's builder gives no gradient for {', '.join(missing)}")
        place = device.ort_device()
        self._agent = state.TrainingAgent(
            self._session._sess,
            self.inputs,
            [place] * len(self.outputs),
            fetches,
            [place] * len(fetches),
            0,
        )
        self._cache = state.OrtValueCache()
        self._new_state = state.PartialGraphExecutionState
        self.vector = state.OrtValueVector

    def pack(self, values: Sequence[Value]) -> Any:
        """The runtime's vector of tensors, which holds references to them."""
        vector = self.vector()
        for value in values:
            vector.push_back(value)
        return vector

    def forward(self, feeds: Any, fetches: Any) -> Any:
        """Run to the outputs; the returned state serves one :meth:`backward`."""
        state = self._new_state()
        try:
            self._agent.run_forward(feeds, fetches, state, self._cache)
        except Exception as error:  # onnxruntime has its own exception classes
            raise GraphError(f"the forward graph failed: {error_reason(error)}") from error
        return state

    def backward(self, cotangents: Any, fetches: Any, state: Any) -> None:
        """Run from the cotangents of the outputs to the gradients."""
        try:
            self._agent.run_backward(cotangents, fetches, state)
        except Exception as error:  # onnxruntime has its own exception classes
            raise GraphError(f"the backward graph failed: {error_reason(error)}") from error


def _of(key: Key) -> str | None:
    """The tensor that a port belongs to."""
    return key.of if isinstance(key, Port) else None


class _AgentBindings:
    """The bindings for batches of one shape."""

    __slots__ = ("costs", "cotangents", "data", "feeds", "loss", "predicted", "scales")

    def __init__(self, engine: TrainingAgentEngine, batch: Batch) -> None:
        agent = engine._agent
        self.data = DataBuffers(engine.device, engine._columns.values(), batch)
        self.data.fill(batch)
        columns = engine.problem.column_ports
        inputs: dict[Key, Value] = {columns[n]: v for n, v in self.data.values.items()}
        weights = [engine._weights.at_ports(version) for version in (0, 1)]
        for name in agent.inputs:
            key = engine._fed[name]
            if key not in inputs and key not in weights[0]:
                inputs[key] = engine.evaluator.frozen_port(key)
        first, second = (
            agent.pack([inputs.get(engine._fed[n]) or own[engine._fed[n]] for n in agent.inputs])
            for own in weights
        )
        self.feeds = (first, second)
        # A first forward pass shows the shapes of the outputs; from then on they are fixed.
        trial = agent.vector()
        agent.forward(self.feeds[engine._weights.current], trial)
        outputs = [engine._made[name] for name in agent.outputs]
        values = {
            key: engine.device.empty(tuple(trial[k].shape()), engine._spec(key).numpy)
            for k, key in enumerate(outputs)
        }
        cotangents = {
            key: engine.device.empty(tuple(value.shape()), engine._spec(key).numpy)
            for key, value in values.items()
        }
        self.predicted = agent.pack([values[key] for key in outputs])
        # The runtime accepts no cotangent for an output that depends on no parameter.
        wanted = [engine._made[name] for name in agent.differentiable]
        self.cotangents = agent.pack([cotangents[key] for key in wanted])
        hosts = HostVector(engine._loss, engine.device, engine._constants)
        self.scales = Scales(engine.problem, hosts)
        gives = engine._loss.gives
        costs: dict[Key, Value] = {
            port: engine.device.empty([], gives[port].numpy) for port in engine._costs
        }
        self.costs = [Scalar(engine.device, value) for value in costs.values()]
        slopes: dict[Key, Value] = {
            Port("gradient", of=_of(key)): value for key, value in cotangents.items()
        }
        self.loss = engine.bind(engine._loss, hosts, {**values, **inputs}, {**costs, **slopes})


class TrainingAgentEngine(TwinEngine):
    """A compiled problem on TrainingAgent (see :class:`ortflex_core.Engine`)."""

    steps_per_run = 1

    def __init__(self, problem: Problem, device: Device, runtime: Runtime) -> None:
        super().__init__(problem, device)
        model = problem.model
        names = problem.parameters
        self._forward = forward_program(problem, ort_gradients.rewrite(problem))
        self._loss = loss_program(problem)
        self._costs = [_LOSS, *loss_ports(problem)]
        self._update = update_program(problem)
        takes, gives = self._forward.takes, self._forward.gives
        state = {n: model.initializer(n) for n in names}
        ports = ports_of("parameter", names)
        # The runtime identifies tensors by their names in the graph.
        called = {n: takes[port].name for n, port in ports.items() if port in takes}
        self._agent = Agent(
            self._forward, [called.get(n, n) for n in names], device, problem.threads
        )
        self._fed = {spec.name: key for key, spec in takes.items()}
        self._made = {spec.name: key for key, spec in gives.items()}
        self._weights = Twins(device, state, ports)
        self._slots = Twins(device, problem.slot_values(), problem.slot_ports)
        shapes = {n: model.initializers[n] for n in names}
        self._gradients = {
            n: device.empty(s.shape or (), s.numpy)  # type: ignore[arg-type]
            for n, s in shapes.items()
        }
        self._owners = {name: n for n, name in called.items()}
        self._fetched = self._fetches(self._gradients)
        self.bind = partial(bind_program, device, problem.threads, self.evaluator.frozen_port)
        self._sum: GradientSum | None = None
        self._first_fetched: list[Any] = []
        """The memory for the gradient of a step's first batch: the sum itself."""
        if problem.updating.accumulate > 1:
            self._sum = GradientSum(problem, device, self._gradients, self.bind)
            self._first_fetched = list(map(self._fetches, self._sum.twins.versions))
        self._exchange: GradientExchange | None = None
        if problem.peers is not None:
            self._exchange = GradientExchange(problem.peers, state, len(self._costs))
            assert self._sum is not None
            self._direct = self._sum.share(self._exchange)
        self._constants = problem.constants()
        self._bind_updates()
        self._plans = PlanCache[_AgentBindings]()
        read = {self._fed[n] for n in self._agent.inputs}
        # The columns that the loss reads, and the model's inputs that the agent reads.
        unused = {i.name for i in model.inputs if problem.column_ports[i.name] not in read}
        self._columns = {s.name: s for s in problem.columns if s.name not in unused}
        self._last: tuple[Any, int, _AgentBindings] | None = None

    def _fetches(self, gradients: Mapping[str, Value]) -> Any:
        """Memory for the gradients of all parameters, in the form that the backward pass needs."""
        return self._agent.pack([gradients[self._owners[n]] for n in self._agent.gradients])

    def _bind_updates(self) -> None:
        """Bind the update for both directions: version 0 to 1 and back."""
        self._update_hosts = HostVector(self._update, self.device, self._constants)
        self._penalty: Scalar | None = None
        costs: dict[Key, Value] = {}
        spec = self._update.gives.get(_PENALTY)
        if spec is not None:
            costs[_PENALTY] = self.device.empty([], spec.numpy)
            self._penalty = Scalar(self.device, costs[_PENALTY])
        self._updates: dict[tuple[int, int], Binder] = {}
        for old in (0, 1):
            known = self._weights.at_ports(old) | self._slots.at_ports(old)
            after = costs | self._weights.at_ports(1 - old) | self._slots.at_ports(1 - old)
            for at, gradients in enumerate(self._gradient_versions()):
                before = {**known, **gradients}
                self._updates[old, at] = self.bind(self._update, self._update_hosts, before, after)

    def _gradient_versions(self) -> Sequence[Mapping[Key, Value]]:
        """The inputs of the update: the gradients, or either version of their sums."""
        if self._sum is not None:
            return [self._sum.twins.at_ports(version) for version in (0, 1)]
        return [{Port("gradient", of=n): v for n, v in self._gradients.items()}]

    def _plan(self, batch: Batch) -> _AgentBindings:
        last = self._last
        if last is not None and last[0] is batch.columns and last[1] == batch.size:
            return last[2]
        key = tuple(batch.shape(n) for n in self._columns)
        plan = self._plans.get(key, lambda: _AgentBindings(self, batch))
        self._last = (batch.columns, batch.size, plan)
        return plan

    def _spec(self, key: Key) -> Any:
        return self.problem.predicted_specs[str(_of(key))]

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> ReadLosses:
        steps = split(batches, len(rates), self.problem.updating.accumulate)
        return ReadLosses([self._one(b, r) for b, r in zip(steps, rates, strict=True)])

    def _one(self, batches: Sequence[Batch], rate: float) -> tuple[float, ...]:
        now = self._weights.current
        several, total, exchange = len(batches) > 1, self._sum, self._exchange
        denominators = total_denominators(batches) if several else batches[0].denominators
        costs = (0.0,) * len(self._costs)
        if total is None:
            costs = self._gradient(batches[0], denominators, self._fetched)
        elif exchange is not None:
            for start, own, present in exchange.peers.rounds(len(batches)):
                if own is not None:
                    exchange.costs[:] = self._gradient(batches[own], denominators, self._fetched)
                    read_into(self.device, self._gradients, exchange.own)
                for more in exchange.add(start, present):
                    costs = tuple(map(add, costs, more))
            if not self._direct:
                total.twins.write(exchange.sums, "sum")
        else:
            first = self._first_fetched[total.twins.current]
            costs = self._gradient(batches[0], denominators, first)
            for batch in batches[1:]:
                costs = tuple(map(add, costs, self._gradient(batch, denominators, self._fetched)))
                total.add()
        self._update_hosts.update({_RATE: rate, _COUNTER: self._step + 1})
        self._updates[now, 0 if total is None else total.twins.current].run()
        self._weights.current = self._slots.current = 1 - now
        self._step += 1
        loss, *each = costs
        return loss, 0.0 if self._penalty is None else self._penalty.read(), *each

    def _gradient(
        self, batch: Batch, denominators: Sequence[float], into: Any
    ) -> tuple[float, ...]:
        """The gradients of one batch; returns its loss, and each of several losses."""
        plan = self._plan(batch)
        plan.data.fill(batch)
        state = self._agent.forward(plan.feeds[self._weights.current], plan.predicted)
        plan.scales.set(denominators)
        plan.loss.run()
        self._agent.backward(plan.cotangents, into, state)
        return tuple(cost.read() for cost in plan.costs)

    def gradients(self) -> dict[str, Array]:
        """Copies of the last step's gradients of the loss, without the penalty's part."""
        if self._sum is not None:
            return self._sum.twins.read()
        return {n: self.device.read(v) for n, v in self._gradients.items()}

    def programs(self) -> dict[str, Program | bytes]:
        graphs: dict[str, Program | bytes] = {
            "forward": self._forward,
            "gradient": self._agent.model,
        }
        graphs |= {"loss": self._loss, "update": self._update}
        return graphs | {p.name: p for p in self.evaluator.programs.values()}

    def counters(self) -> dict[str, int]:
        binders = [plan.loss for plan in self._plans] + list(self._updates.values())
        if self._sum is not None:
            binders += self._sum.binders.values()
        return {**binding_counts(binders), "steps": self._step}

    def close(self) -> None:
        self._plans.clear()
        self._last = None
