"""The whole training step as one graph of standard operators, on any onnxruntime.

Forward, loss, backward, penalty and update are one graph, run once a step. Weights and optimizer
state exist in two versions; the graph reads one and writes the other, and two ready-made sets of
bindings take turns, so that nothing is bound or copied between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import compose, modes
from ortflex_core.binder import Binder, HostVector
from ortflex_core.data import Batch
from ortflex_core.errors import GraphError, NoGradientRule, NotDifferentiable
from ortflex_core.evaluate import Evaluator
from ortflex_core.problem import Problem
from ortflex_core.program import Program
from ortflex_core.protocols import Backend, Device, Value
from ortflex_core.runtime import Runtime
from ortflex_core.session import session
from ortflex_core.types import Array
from ortflex_plugins.backends.buffers import DataBuffers, ReadLosses, Scalar, Twins, scales


@attrs.frozen(kw_only=True)
class FusedBackend(Backend):
    """Train on any onnxruntime, inference builds included: one graph, one run a step.

    Any loss, penalty and optimizer works; every operator between a parameter and a loss needs a
    gradient rule (``ortflex.gradients``).

    Example:
        >>> trainer = Trainer("model.onnx", backend="fused")  # doctest: +SKIP
    """

    name: ClassVar[str] = "fused"
    priority: ClassVar[int] = 30

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """Any onnxruntime will do."""
        return []

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        against = modes.reasons(problem)
        if against:
            return against
        try:
            compose.step_program(problem)
        except (NoGradientRule, NotDifferentiable, GraphError) as error:
            return [str(error)]
        return []

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> FusedEngine:
        return FusedEngine(problem, device)


class FusedEngine:
    """A compiled problem in one graph (see :class:`ortflex_core.protocols.Engine`)."""

    steps_per_run = 1

    def __init__(self, problem: Problem, device: Device) -> None:
        self.problem = problem
        self.device = device
        model = problem.model
        self._program = compose.step_program(problem)
        self._session = session(self._program, device, problem.threads)
        self._weights = Twins(device, {n: model.initializer(n) for n in problem.parameters})
        zeros = {f"{s}/{p}": np.zeros_like(model.initializer(p)) for s, p in problem.slots}
        self._slots = Twins(device, zeros)
        self._buffers = Twins(device, {n: model.initializer(n) for n in problem.buffers})
        self._twins = (self._weights, self._slots, self._buffers)
        self._step = 0
        self._evaluator = Evaluator(problem, device)
        self._hosts = HostVector(self._program, device, problem.constants())
        costs = {o.name: device.empty([], o.numpy) for o in self._program.outputs if o.name in ("loss", "penalty")}
        self._costs = costs
        self._loss = Scalar(device, costs["loss"])
        self._penalty = Scalar(device, costs["penalty"]) if "penalty" in costs else None
        labels = [t.label for t in problem.terms]
        weights = [t.weight for t in problem.terms if t.weight is not None]
        used = {i.name for i in self._program.inputs}
        self._columns = {s.name: s for s in (*model.inputs, *labels, *weights) if s.name in used}
        self._binders: list[Binder] = []
        self._plans: dict[tuple[Any, ...], tuple[DataBuffers, tuple[Binder, Binder]]] = {}
        self._last: tuple[Any, int, DataBuffers, tuple[Binder, Binder]] | None = None
        self._denominators: Sequence[float] | None = None
        self._values: dict[str, float] = {}

    def _plan(self, batch: Batch) -> tuple[DataBuffers, tuple[Binder, Binder]]:
        last = self._last
        if last is not None and last[0] is batch.columns and last[1] == batch.size:
            return last[2], last[3]
        key = tuple(batch.shape(n) for n in self._columns)
        if key not in self._plans:
            data = DataBuffers(self.device, self._columns.values(), batch)
            self._plans[key] = (data, (self._bind(data, 0), self._bind(data, 1)))
        data, binders = self._plans[key]
        self._last = (batch.columns, batch.size, data, binders)
        return data, binders

    def _bind(self, data: DataBuffers, old: int) -> Binder:
        """Bindings of a step from version ``old`` of weights and slots to the other one."""
        binder = Binder(self._session, "step")
        self._binders.append(binder)
        known = dict(data.values)
        for twins in self._twins:
            known |= twins.versions[old]
        for spec in self._program.inputs:
            value = known.get(spec.name)
            binder.input(spec.name, self._evaluator.frozen(spec.name) if value is None else value)
        binder.hosts(self._hosts)
        for name, value in self._costs.items():
            binder.output(name, value)
        for twins in self._twins:
            for name, value in twins.versions[1 - old].items():
                binder.output(f"new/{name}", value)
        return binder

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> ReadLosses:
        out = []
        values = self._values
        for batch, rate in zip(batches, rates, strict=True):
            data, binders = self._plan(batch)
            data.fill(batch)
            if batch.denominators is not self._denominators:
                self._denominators = batch.denominators
                values.update(scales(self.problem, batch))
            values["rate"] = rate
            values["step"] = self._step + 1
            self._hosts.update(values)
            now = self._weights.current
            binders[now].run()
            for twins in self._twins:
                twins.current = 1 - now
            self._step += 1
            penalty = self._penalty.read() if self._penalty is not None else 0.0
            out.append((self._loss.read(), penalty))
        return ReadLosses(out)

    @property
    def _now(self) -> dict[str, Value]:
        return {**self._weights.values, **self._buffers.values}

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

    def buffers(self) -> dict[str, Array]:
        return self._buffers.read()

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        self._buffers.write(buffers, "buffer")

    def slots(self) -> dict[str, Array]:
        return {**self._slots.read(), "step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        self._slots.write({k: v for k, v in slots.items() if k != "step"}, "optimizer slot")
        self._step = int(slots.get("step", self._step))

    def programs(self) -> dict[str, Program | bytes]:
        graphs: dict[str, Program | bytes] = {"step": self._program}
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
