"""onnxruntime's TrainingAgent: forward and backward are the runtime's, all else are our graphs.

One step is: the model's forward pass; one graph for loss and its gradient; the model's backward
pass; one graph for the penalty, if there is one; one graph that updates all weights. Every tensor
between them lives in a buffer that is bound once, also those that the agent itself writes: its
outputs are handed to it ready-made, which is quicker than letting it allocate, and the only way
that the predictions survive its backward pass (it reuses their memory otherwise).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import compose, updates
from ortflex_core.binder import Binder, HostVector
from ortflex_core.data import Batch
from ortflex_core.errors import Unsupported
from ortflex_core.evaluate import Evaluator
from ortflex_core.model import Model, Rewrite
from ortflex_core.problem import Problem
from ortflex_core.program import Program
from ortflex_core.protocols import Device, LayerBackend, Value
from ortflex_core.runtime import Runtime
from ortflex_core.session import session
from ortflex_core.types import Array
from ortflex_plugins.backends import ort_gradients
from ortflex_plugins.backends.accumulating import split, together
from ortflex_plugins.backends.agent import Agent
from ortflex_plugins.backends.buffers import (
    DataBuffers,
    ReadLosses,
    Scalar,
    Scales,
    Twins,
    averaged,
    check_state,
    start_average,
)


@attrs.frozen(kw_only=True)
class TrainingAgentBackend(LayerBackend):
    """Train by TrainingAgent of onnxruntime-training 1.16 and 1.19.

    Any loss, penalty and optimizer works; the model's operators must be among those that
    onnxruntime's gradient builder differentiates rightly (they are checked first).

    Example:
        >>> trainer = Trainer("model.onnx", backend="training_agent")  # doctest: +SKIP
    """

    name: ClassVar[str] = "training_agent"
    priority: ClassVar[int] = 10

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        if runtime.has_training_agent:
            return []
        return [
            f"{runtime} has no TrainingAgent; "
            "install 'ortflex[agent]' or 'ortflex[session]' into an environment of its own"
        ]

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        return self.available(runtime) or ort_gradients.reasons(problem, runtime)

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> TrainingAgentEngine:
        return TrainingAgentEngine(problem, device, runtime)

    def replacing(self, model: Model, wrt: Sequence[str], outputs: Sequence[str]) -> Rewrite:
        return ort_gradients.replacing(model, wrt, outputs)

    def passes(
        self, program: Program, wrt: Sequence[str], device: Device, runtime: Runtime, threads: int
    ) -> Agent:
        names = [o.name for o in program.outputs]
        found = ort_gradients.obstacles(program.proto(), wrt, names, runtime, updates=False)
        if found:
            raise Unsupported("\n".join(o.text for o in found))
        return Agent(program, wrt, device, threads)


class _Plan:
    """What is bound for batches of one shape."""

    __slots__ = ("cotangents", "data", "feeds", "loss", "loss_value", "predicted", "scales")

    data: DataBuffers
    feeds: tuple[Any, Any]
    predicted: Any
    loss: Binder
    scales: Scales
    loss_value: Any
    cotangents: Any


class _Sum:
    """The gradients of a step's batches, added up in two versions that swap."""

    def __init__(self, engine: TrainingAgentEngine) -> None:
        problem, device = engine.problem, engine.device
        zeros = {n: np.zeros_like(problem.model.initializer(n)) for n in problem.parameters}
        self._zeros = {f"gradient/{n}": array for n, array in zeros.items()}
        self.sums = Twins(device, self._zeros)
        self.program = updates.adding_program(problem)
        self._hosts = HostVector(self.program, device, problem.constants())
        self._binders = []
        for old in (0, 1):
            binder = Binder(session(self.program, device, problem.threads), self.program.name)
            for name, value in engine._gradients.items():
                binder.input(f"batch/{name}", value)
            for name, value in self.sums.versions[old].items():
                binder.input(name, value)
            for name, value in self.sums.versions[1 - old].items():
                binder.output(f"new/{name}", value)
            binder.hosts(self._hosts)
            self._binders.append(binder)

    def add(self, *, keep: bool) -> int:
        """Add a batch's gradients to what there is, or replace it; returns the version to read."""
        self._hosts.update({"keep": float(keep)})
        self._binders[self.sums.current].run()
        self.sums.current = 1 - self.sums.current
        return self.sums.current

    def clear(self) -> None:
        """Forget what was summed: after a training that went wrong it is not finite."""
        self.sums.write(self._zeros, "sum")


class TrainingAgentEngine:
    """A compiled problem on TrainingAgent (see :class:`ortflex_core.protocols.Engine`)."""

    steps_per_run = 1

    def __init__(self, problem: Problem, device: Device, runtime: Runtime) -> None:
        self.problem = problem
        self.device = device
        model = problem.model
        names = problem.parameters
        self._forward = compose.forward_program(problem, ort_gradients.rewrite(problem, runtime))
        self._loss = compose.loss_program(problem)
        self._penalty = compose.penalty_program(problem)
        penalized = (
            [o.name.removeprefix("gradient/") for o in self._penalty.outputs[1:]]
            if self._penalty
            else []
        )
        self._update = updates.update_program(problem, penalized)
        self._agent = Agent(self._forward, names, device, problem.threads)
        self._weights = Twins(device, {n: model.initializer(n) for n in names})
        self._slots = Twins(device, problem.slot_values())
        self._step = 0
        self._evaluator = Evaluator(problem, device)
        shapes = {n: model.initializers[n] for n in names}
        self._gradients = {
            n: device.empty(s.shape or (), s.numpy)  # type: ignore[arg-type]
            for n, s in shapes.items()
        }
        self._fetched = self._agent.pack([self._gradients[n] for n in self._agent.gradients])
        self._sum = _Sum(self) if problem.updating.accumulate > 1 else None
        self._constants = problem.constants()
        self._binders: list[Binder] = []
        self._bind_updates(penalized)
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        labels = [t.label for t in problem.terms]
        weights = [t.weight for t in problem.terms if t.weight is not None]
        inputs = [i for i in model.inputs if i.name in self._agent.inputs]
        self._columns = {s.name: s for s in (*inputs, *labels, *weights)}
        self._last: tuple[Any, int, _Plan] | None = None

    def _binder(self, program: Program) -> Binder:
        binder = Binder(session(program, self.device, self.problem.threads), program.name)
        self._binders.append(binder)
        return binder

    def _bind_updates(self, penalized: Sequence[str]) -> None:
        """Bind penalty and update for both directions: version 0 to 1 and back."""
        device = self.device
        self._update_hosts = HostVector(self._update, device, self._constants)
        cost = device.empty([], np.float32)
        penalties = {}
        if self._penalty is not None:
            cost = device.empty([], self._penalty.outputs[0].numpy)
            self._penalty_hosts = HostVector(self._penalty, device, self._constants)
            self._penalty_hosts.update({})
            penalties = {
                n: device.empty(
                    tuple(self._gradients[n].shape()), self.problem.model.initializers[n].numpy
                )
                for n in penalized
            }
        self._penalty_value = Scalar(device, cost)
        self._penalties: list[Binder] = []
        self._updates: dict[tuple[int, int], Binder] = {}
        for old in (0, 1):
            weights, slots = self._weights.versions[old], self._slots.versions[old]
            new_weights, new_slots = self._weights.versions[1 - old], self._slots.versions[1 - old]
            if self._penalty is not None:
                binder = self._binder(self._penalty)
                for spec in self._penalty.inputs:
                    binder.input(spec.name, weights[spec.name])
                binder.hosts(self._penalty_hosts)
                binder.output("penalty", cost)
                for name, value in penalties.items():
                    binder.output(f"gradient/{name}", value)
                self._penalties.append(binder)
            known = {**weights, **slots}
            known |= {f"penalty/{n}": v for n, v in penalties.items()}
            for at, gradients in enumerate(self._gradient_versions()):
                binder = self._binder(self._update)
                for spec in self._update.inputs:
                    binder.input(spec.name, gradients.get(spec.name) or known[spec.name])
                binder.hosts(self._update_hosts)
                for name, value in (*new_weights.items(), *new_slots.items()):
                    binder.output(f"new/{name}", value)
                self._updates[old, at] = binder

    def _gradient_versions(self) -> Sequence[Mapping[str, Value]]:
        """What the update reads: the gradients, or either version of their sums."""
        if self._sum is not None:
            return self._sum.sums.versions
        return ({f"gradient/{n}": v for n, v in self._gradients.items()},)

    def _plan(self, batch: Batch) -> _Plan:
        last = self._last
        if last is not None and last[0] is batch.columns and last[1] == batch.size:
            return last[2]
        key = tuple(batch.shape(n) for n in self._columns)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(batch)
        self._last = (batch.columns, batch.size, plan)
        return plan

    def _make_plan(self, batch: Batch) -> _Plan:
        plan = _Plan()
        agent = self._agent
        plan.data = DataBuffers(self.device, self._columns.values(), batch)
        plan.data.fill(batch)
        inputs = {**plan.data.values}
        for name in agent.inputs:
            if name not in inputs and name not in self._weights.values:
                inputs[name] = self._evaluator.frozen(name)
        first, second = (
            agent.pack([inputs.get(n) or version[n] for n in agent.inputs])
            for version in self._weights.versions
        )
        plan.feeds = (first, second)
        # A first forward pass tells the shapes of the outputs; from then on they are fixed.
        trial = agent.vector()
        agent.forward(plan.feeds[self._weights.current], trial)
        values = {
            name: self.device.empty(tuple(trial[k].shape()), self._spec(name).numpy)
            for k, name in enumerate(agent.outputs)
        }
        cotangents = {
            name: self.device.empty(tuple(value.shape()), self._spec(name).numpy)
            for name, value in values.items()
        }
        plan.predicted = agent.pack([values[n] for n in agent.outputs])
        # Of outputs that depend on no parameter the runtime wants none.
        plan.cotangents = agent.pack([cotangents[n] for n in agent.differentiable])
        plan.loss = self._binder(self._loss)
        hosts = HostVector(self._loss, self.device, self._constants)
        plan.scales = Scales(self.problem, hosts)
        cost = self.device.empty([], self._loss.outputs[0].numpy)
        plan.loss_value = Scalar(self.device, cost)
        for spec in self._loss.inputs:
            plan.loss.input(spec.name, values.get(spec.name) or plan.data.values[spec.name])
        plan.loss.hosts(hosts)
        plan.loss.output("loss", cost)
        for name, value in cotangents.items():
            plan.loss.output(f"gradient/{name}", value)
        return plan

    def _spec(self, name: str) -> Any:
        return next(t.predicted for t in self.problem.terms if t.predicted.name == name)

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> ReadLosses:
        steps = split(batches, len(rates), self.problem.updating.accumulate)
        return ReadLosses([self._one(b, r) for b, r in zip(steps, rates, strict=True)])

    def _one(self, batches: Sequence[Batch], rate: float) -> tuple[float, float]:
        now = self._weights.current
        below = batches[0].denominators if len(batches) == 1 else together(batches)
        loss, at = 0.0, 0
        for k, batch in enumerate(batches):
            plan = self._plan(batch)
            plan.data.fill(batch)
            state = self._agent.forward(plan.feeds[now], plan.predicted)
            plan.scales.set(below)
            plan.loss.run()
            self._agent.backward(plan.cotangents, self._fetched, state)
            if self._sum is not None:
                at = self._sum.add(keep=k > 0)
            loss += plan.loss_value.read()
        if self._penalties:
            self._penalties[now].run()
        self._update_hosts.update({"rate": rate, "step": self._step + 1})
        self._updates[now, at].run()
        self._weights.current = self._slots.current = 1 - now
        self._step += 1
        return loss, self._penalty_value.read() if self._penalties else 0.0

    def gradients(self) -> dict[str, Array]:
        """Copies of the last step's gradients of the loss, without the penalty's part."""
        return {n: self.device.read(v) for n, v in self._gradients.items()}

    @property
    def _now(self) -> dict[str, Value]:
        """What predictions are made with."""
        return {**self._weights.values, **averaged(self.problem, self._slots)}

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        return self._evaluator.evaluate(self._now, batch, outputs)

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        return self._evaluator.predict(self._now, batch, outputs)

    def state(self) -> dict[str, Array]:
        return self._weights.read()

    def load(self, state: Mapping[str, Array]) -> None:
        self._weights.write(state, "parameter")
        start_average(self.problem, self._slots, state)
        if self._sum is not None:
            self._sum.clear()

    def buffers(self) -> dict[str, Array]:
        """None: BatchNormalization's statistics are frozen here."""
        return {}

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        check_state(buffers, {}, "buffer")

    def slots(self) -> dict[str, Array]:
        return {**self._slots.read(), "step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        tensors = {k: v for k, v in slots.items() if k != "step"}
        self._slots.write(tensors, "optimizer slot")
        self._step = int(slots.get("step", self._step))

    def programs(self) -> dict[str, Program | bytes]:
        graphs: dict[str, Program | bytes] = {
            "forward": self._forward,
            "gradient": self._agent.model,
        }
        graphs |= {"loss": self._loss, "update": self._update}
        if self._penalty is not None:
            graphs["penalty"] = self._penalty
        return graphs | {p.name: p for p in self._evaluator.programs.values()}

    def counters(self) -> dict[str, int]:
        return {
            "bindings_made": sum(b.misses for b in self._binders),
            "bindings_reused": sum(b.hits for b in self._binders),
            "steps": self._step,
        }

    def close(self) -> None:
        self._plans.clear()
        self._last = None
