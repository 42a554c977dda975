"""The reference of all backends: the fused step in float64, without simplifications of the graph.

The reference therefore reveals errors of a simplification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from ortflex_core.compiler.graph.ports import Key, Port, ports_of
from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.programs.stages import PENALTY, evaluation_program, prediction_program
from ortflex_core.compiler.programs.step import step_program
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.engine_protocols import Device
from ortflex_core.kernel.types import Array
from ortflex_core.tools import export_check
from ortflex_core.tools.divergence import Found, Step
from ortflex_core.tools.double_precision import run_widened, widened
from ortflex_core.training.engines.evaluator import by_name


class Double:
    """The fused step in float64, from arrays to arrays.

    ``probe`` is the problem with plain gradient descent; :meth:`step` computes the gradients from the
    weights that it changes.
    """

    name = "float64"

    def __init__(self, problem: Problem, probe: Problem | None, device: Device) -> None:
        self._problem, self._probe, self._device = problem, probe or problem, device
        self._programs: dict[tuple[bool, int], Program] = {}

    def step(self, start: Step, batches: Sequence[Batch], rate: float) -> Found:
        """One step from a state; the weights after the step are float32 again."""
        outputs = self._outputs(True, start, batches, 1.0)
        gradients = {n: a - outputs[Port("parameter", of=n)] for n, a in start.weights.items()}
        loss, penalty, after = self.advance(start, batches, rate)
        return Found(loss + penalty, gradients, after)

    def advance(
        self, start: Step, batches: Sequence[Batch], rate: float
    ) -> tuple[float, float, Step]:
        """Loss, penalty and the next state, in float32 again, without the gradients."""
        problem = self._problem
        results = self._outputs(False, start, batches, rate)
        factors = _factors(problem, batches)
        penalty = np.sum(results.get(PENALTY, 0.0)).item()
        parts = [term.at(0, k, None) for term in problem.terms for k in range(len(batches))]
        loss = sum(results[p.total_port].item() * factors[p.scale_symbol] for p in parts)

        def new(group: Mapping[str, Array], ports: Mapping[str, Port]) -> dict[str, Array]:
            with np.errstate(over="ignore"):  # the comparison checks for values that are not finite
                return {
                    n: results[ports[n]].astype(a.dtype) for n, a in group.items() if n in ports
                }

        weights = new(start.weights, ports_of("parameter", start.weights))
        slots = {
            **new(start.slots, problem.slot_ports),
            "step": np.asarray(start.slots["step"] + 1),
        }
        buffers = new(start.buffers, ports_of("buffer", start.buffers))
        return loss, penalty, Step(weights, slots, buffers)

    def tensors(self, start: Step, batch: Batch, names: Sequence[str]) -> dict[str, Array]:
        """Tensors of the graph, computed with the weights at the start of the step."""
        program = widened(prediction_program(self._problem, names))
        columns = _columns(self._problem, [batch])
        return by_name(self._run(program, start, columns, self._problem.constants()))

    def served(
        self, start: Step, batch: Batch, names: Sequence[str], export: export_check.Export
    ) -> export_check.Served:
        """The results of a state in inference mode; the exported model has the same state."""
        totals, tensors = self.evaluate(start, batch, names)
        exported = export({**self._averaged(start).weights, **start.buffers}, batch)
        return export_check.Served(tensors, totals, exported)

    def evaluate(
        self, start: Step, batch: Batch, names: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Σ w·l of each loss term and tensors of the graph, with the averages if there are any."""
        program = widened(evaluation_program(self._problem, names))
        columns = _columns(self._problem, [batch])
        results = self._run(program, self._averaged(start), columns, self._problem.constants())
        return [results[t.total_port].item() for t in self._problem.terms], by_name(results)

    def predict(self, start: Step, batch: Batch, names: Sequence[str]) -> dict[str, Array]:
        """Tensors of the graph, with the averages if there are any."""
        return self.tensors(self._averaged(start), batch, names)

    def _averaged(self, step: Step) -> Step:
        """The state with the averages of the weights instead of the weights."""
        weights = self._problem.averaged(step.weights, step.slots)
        return attrs.evolve(step, weights=weights)

    def _outputs(
        self, probing: bool, start: Step, batches: Sequence[Batch], rate: float
    ) -> dict[Key, Array]:
        """The outputs of the step's graph; with ``probing``, of plain gradient descent."""
        problem = self._probe if probing else self._problem
        key = (probing, len(batches))
        if key not in self._programs:
            updating = attrs.evolve(problem.updating, accumulate=len(batches))
            part = attrs.evolve(problem, updating=updating)
            self._programs[key] = widened(step_program(part, plain=True))
        values = problem.constants() | _factors(problem, batches)
        updates = int(start.slots["step"])
        drawn = updates * problem.updating.accumulate + 1
        values |= {Port("draw", batch=k).label: drawn + k for k in range(len(batches))}
        values |= {Port("rate").label: rate, Port("counter").label: updates + 1}
        return self._run(self._programs[key], start, _columns(problem, batches), values)

    def _run(
        self,
        program: Program,
        start: Step,
        columns: Mapping[Key, Array],
        values: Mapping[str, float],
    ) -> dict[Key, Array]:
        known = dict(columns)
        slots = self._problem.slot_ports
        for group, ports in (
            (start.weights, ports_of("parameter", start.weights)),
            (start.buffers, ports_of("buffer", start.buffers)),
            (start.slots, slots),
        ):
            known |= {ports[n]: array for n, array in group.items() if n in ports}
        for port in program.takes:
            if port not in known and isinstance(port, Port):
                known[port] = self._problem.model.initializer(str(port.of))
        return run_widened(
            program, {key: known[key] for key in program.takes}, values, self._device
        )


def _columns(problem: Problem, batches: Sequence[Batch]) -> dict[Key, Array]:
    ports = problem.column_ports
    return {
        attrs.evolve(ports[name], batch=k): batch.array(name)
        for k, batch in enumerate(batches)
        for name in batch.columns
        if name in ports
    }


def _factors(problem: Problem, batches: Sequence[Batch]) -> dict[str, float]:
    """The factors of the totals of every batch of a step."""
    denominators = [sum(d) for d in zip(*(b.denominators for b in batches), strict=True)]
    out: dict[str, float] = {}
    for k in range(len(batches)):
        local = attrs.evolve(problem, terms=tuple(t.at(0, k, None) for t in problem.terms))
        out |= local.scales(denominators)
    return out
