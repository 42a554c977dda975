"""What backends are compared with: the fused step in float64, without any pass of ours.

A wrong pass shows where the reference has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from ortflex_core.batches import Batch
from ortflex_core.compose import prediction_program
from ortflex_core.double import run_widened, widened
from ortflex_core.parting import Found, Step
from ortflex_core.problem import Problem
from ortflex_core.program import Program
from ortflex_core.protocols import Device
from ortflex_core.step import step_program, suffixes_of
from ortflex_core.types import Array


class Double:
    """The fused step in float64, from arrays to arrays; ``probe`` is the problem with plain descent."""

    name = "float64"

    def __init__(self, problem: Problem, probe: Problem, device: Device) -> None:
        self._problem, self._probe, self._device = problem, probe, device
        self._programs: dict[tuple[bool, int], Program] = {}

    def step(self, start: Step, batches: Sequence[Batch], rate: float) -> Found:
        """One step from the given state; the weights of the next one are float32 again."""
        problem = self._problem
        moved = self._moved(True, start, batches, 1.0)
        made = self._moved(False, start, batches, rate)
        gradients = {n: a - moved[f"new/{n}"] for n, a in start.weights.items()}
        [(suffix, parts)] = suffixes_of(1, len(batches))
        factors = _factors(problem, batches)
        cost = np.sum(made.get(f"penalty{suffix}", 0.0)).item() + sum(
            made[f"total/{t.index}{part}"].item() * factors[f"{t.prefix}/scale{part}"]
            for t in problem.terms
            for part in parts
        )

        def new(group: Mapping[str, Array]) -> dict[str, Array]:
            with np.errstate(over="ignore"):  # whoever compares looks at what is not finite
                return {
                    n: made[f"new/{n}"].astype(a.dtype) for n, a in group.items() if n != "step"
                }

        slots = {**new(start.slots), "step": np.asarray(start.slots["step"] + 1)}
        return Found(cost, gradients, Step(new(start.weights), slots, new(start.buffers)))

    def tensors(self, start: Step, batch: Batch, names: Sequence[str]) -> dict[str, Array]:
        """Tensors of the graph from the weights that the step starts with."""
        program = widened(prediction_program(self._problem, names))
        columns = {n: batch.array(n) for n in batch.columns}
        return self._run(program, start, columns, self._problem.constants())

    def _moved(
        self, probing: bool, start: Step, batches: Sequence[Batch], rate: float
    ) -> dict[str, Array]:
        """What the step's graph gives; ``probing``: that of plain gradient descent."""
        problem = self._probe if probing else self._problem
        key = (probing, len(batches))
        if key not in self._programs:
            updating = attrs.evolve(problem.updating, accumulate=len(batches))
            program = step_program(attrs.evolve(problem, updating=updating), plain=True)
            self._programs[key] = widened(program)
        [(suffix, parts)] = suffixes_of(1, len(batches))
        values = problem.constants() | _factors(problem, batches)
        made = int(start.slots["step"])
        drawn = made * problem.updating.accumulate + 1
        values |= {f"step{part}": drawn + k for k, part in enumerate(parts)}
        values |= {f"rate{suffix}": rate, f"step{suffix}": made + 1}
        columns = {
            n + part: batch.array(n)
            for part, batch in zip(parts, batches, strict=True)
            for n in batch.columns
        }
        return self._run(self._programs[key], start, columns, values)

    def _run(
        self,
        program: Program,
        start: Step,
        columns: Mapping[str, Array],
        values: Mapping[str, float],
    ) -> dict[str, Array]:
        known = {**start.weights, **start.slots, **start.buffers, **columns}
        kept = self._problem.model.initializer
        feeds = {s.name: known[s.name] if s.name in known else kept(s.name) for s in program.inputs}
        return run_widened(program, feeds, values, self._device)


def _factors(problem: Problem, batches: Sequence[Batch]) -> dict[str, float]:
    """What the totals of a step's batches are multiplied with, in each of them."""
    [(_, parts)] = suffixes_of(1, len(batches))
    below = [sum(d) for d in zip(*(b.denominators for b in batches), strict=True)]
    out: dict[str, float] = {}
    for term, divisor in zip(problem.terms, below, strict=True):
        factor = term.factor / (1.0 if problem.reduction == "sum" else divisor) if divisor else 0.0
        out |= {f"{term.prefix}/scale{part}": factor for part in parts}
    return out
