"""A backend that computes in float64, for the kit of backends to compare others with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Backend,
    Batch,
    Device,
    Problem,
    Program,
    ReadLosses,
    Runtime,
    buffer_value,
)
from ortflex_core.kernel.types import Arrays
from ortflex_core.tools.divergence import Step
from ortflex_core.tools.double_step import Double


class ReferenceEngine:
    """Steps of ``ortflex_core.tools.double_step.Double``; the state between two steps is float32."""

    steps_per_run = 1
    checks_memory = False

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem, self._double = problem, Double(problem, None, device)
        weights = {n: problem.model.initializer(n) for n in problem.parameters}
        slots = {**problem.slot_values(), "step": np.asarray(0)}
        buffers = {n: buffer_value(problem, n) for n in problem.buffers}
        self._now = Step(weights, slots, buffers)

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> ReadLosses:
        """Train one step for each rate; each step has ``accumulate`` batches."""
        count, pairs = self._problem.updating.accumulate, []
        for k, rate in enumerate(rates):
            part = batches[k * count : (k + 1) * count]
            loss, penalty, self._now = self._double.advance(self._now, part, rate)
            pairs.append((loss, penalty))
        return ReadLosses(pairs)

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Return Σ w·l of each loss term, and outputs of the model."""
        return self._double.evaluate(self._now, batch, outputs)

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        """Return outputs of the model."""
        return self._double.predict(self._now, batch, outputs)

    def state(self) -> dict[str, Array]:
        """Return copies of the weights."""
        return {n: np.array(a) for n, a in self._now.weights.items()}

    def load(self, state: Arrays) -> None:
        """Set the weights; their averages start from these values."""
        keys = self._problem.average_keys
        averages = {keys[n]: np.array(a) for n, a in state.items() if n in keys}
        slots = {**self._now.slots, **averages}
        weights = {**self._now.weights, **{n: np.array(a) for n, a in state.items()}}
        self._now = attrs.evolve(self._now, weights=weights, slots=slots)

    def buffers(self) -> dict[str, Array]:
        """Return copies of the running statistics."""
        return {n: np.array(a) for n, a in self._now.buffers.items()}

    def load_buffers(self, buffers: Arrays) -> None:
        """Set the running statistics."""
        self._now = attrs.evolve(self._now, buffers={**self._now.buffers, **buffers})

    def slots(self) -> dict[str, Array]:
        """Return copies of the optimizer's state."""
        return {n: np.array(a) for n, a in self._now.slots.items()}

    def load_slots(self, slots: Arrays) -> None:
        """Set the optimizer's state."""
        self._now = attrs.evolve(self._now, slots={**self._now.slots, **slots})

    def programs(self) -> dict[str, Program | bytes]:
        """Return nothing: there is no graph that other programs could use."""
        return {}

    def counters(self) -> dict[str, int]:
        """Return the number of steps."""
        return {"steps": int(self._now.slots["step"])}

    def close(self) -> None:
        """Do nothing: there are no resources."""


@attrs.frozen(kw_only=True)
class Reference(Backend):
    """Trains, slowly, every model whose operators have gradient rules and float64 kernels."""

    name: ClassVar[str] = "float64"

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """Return no reasons: every runtime is supported."""
        return []

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        """Return no reasons: an unsupported problem is an error when its graph is built."""
        return []

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> ReferenceEngine:
        """Return the engine."""
        return ReferenceEngine(problem, device)
