"""A backend that computes in float64, for the kit of backends to compare others with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs
import numpy as np

from ortflex_core.data.batches import Batch
from ortflex_core.engines.buffers import ReadLosses
from ortflex_core.graph.program import Program
from ortflex_core.model.training_mode import buffer_value
from ortflex_core.problem.problem import Problem
from ortflex_core.protocols import Backend, Device
from ortflex_core.reference.divergence import Step
from ortflex_core.reference.double_step import Double
from ortflex_core.runtime.installation import Runtime
from ortflex_core.types import Array


class ReferenceEngine:
    """Steps by ``ortflex_core.reference.double_step.Double``; the state between two steps is float32."""

    steps_per_run = 1

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem, self._double = problem, Double(problem, None, device)
        weights = {n: problem.model.initializer(n) for n in problem.parameters}
        slots = {**problem.slot_values(), "step": np.asarray(0)}
        buffers = {n: buffer_value(problem, n) for n in problem.buffers}
        self._now = Step(weights, slots, buffers)

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> ReadLosses:
        """Train one step a rate, on as many batches as a step has."""
        count, pairs = self._problem.updating.accumulate, []
        for k, rate in enumerate(rates):
            part = batches[k * count : (k + 1) * count]
            loss, penalty, self._now = self._double.advance(self._now, part, rate)
            pairs.append((loss, penalty))
        return ReadLosses(pairs)

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Σ w·l of each loss term, and outputs."""
        return self._double.evaluate(self._now, batch, outputs)

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        """Outputs."""
        return self._double.predict(self._now, batch, outputs)

    def state(self) -> dict[str, Array]:
        """Copies of the weights."""
        return {n: np.array(a) for n, a in self._now.weights.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Other weights, which their averages then start from."""
        keys = self._problem.average_keys
        averages = {keys[n]: np.array(a) for n, a in state.items() if n in keys}
        slots = {**self._now.slots, **averages}
        weights = {**self._now.weights, **{n: np.array(a) for n, a in state.items()}}
        self._now = attrs.evolve(self._now, weights=weights, slots=slots)

    def buffers(self) -> dict[str, Array]:
        """Copies of the running statistics."""
        return {n: np.array(a) for n, a in self._now.buffers.items()}

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        """Other running statistics."""
        self._now = attrs.evolve(self._now, buffers={**self._now.buffers, **buffers})

    def slots(self) -> dict[str, Array]:
        """Copies of the optimizer's state."""
        return {n: np.array(a) for n, a in self._now.slots.items()}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        """Another state of the optimizer."""
        self._now = attrs.evolve(self._now, slots={**self._now.slots, **slots})

    def programs(self) -> dict[str, Program | bytes]:
        """No graph that others could use."""
        return {}

    def counters(self) -> dict[str, int]:
        """Steps."""
        return {"steps": int(self._now.slots["step"])}

    def close(self) -> None:
        """Nothing is held."""


@attrs.frozen(kw_only=True)
class Reference(Backend):
    """Trains what has gradient rules and float64 kernels, slowly."""

    name: ClassVar[str] = "float64"

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """On every runtime."""
        return []

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        """Everything, or an error of the graph."""
        return []

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> ReferenceEngine:
        """Make the engine."""
        return ReferenceEngine(problem, device)
