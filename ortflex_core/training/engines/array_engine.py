"""An engine for backends that need only one function: run a graph from arrays to arrays.

Weights and slots are arrays on the host, a step is two graphs, and all arrays are fed to each of
them. This is not fast, but makes a backend on another runtime a function of a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ortflex_core.compiler.graph.ports import Key, Port, Role, ports_of
from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.model.training_mode import buffer_value
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.programs import stages
from ortflex_core.compiler.programs.step import gradient_program, update_program
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.errors import NoGradientRule, NotDifferentiable
from ortflex_core.kernel.types import Array
from ortflex_core.training.engines.buffers import ReadLosses, check_state
from ortflex_core.training.engines.evaluator import by_name

_RATE, _COUNTER, _DRAW = (Port(role).label for role in ("rate", "counter", "draw"))

Execute = Callable[[Program, Mapping[str, Array]], Mapping[str, Array]]
"""Runs a graph: ``program.model`` has its bytes, the arrays are by the names of its inputs and outputs."""


def _checked(given: Mapping[str, Array], known: Mapping[str, Array], what: str) -> dict[str, Array]:
    """Copies of arrays that replace known ones."""
    check_state(given, {n: a.shape for n, a in known.items()}, what)
    return {n: np.array(a) for n, a in given.items()}


def _ports(role: Role, arrays: Mapping[str, Array]) -> dict[Key, Array]:
    return {Port(role, of=name): array for name, array in arrays.items()}


class HostEngine:
    """A compiled problem; ``execute`` runs its graphs.

    :meth:`reasons` says why a problem cannot be trained; ``supports`` of a backend returns it.

    >>> HostEngine.steps_per_run
    1
    """

    steps_per_run = 1
    checks_memory = False

    def __init__(self, problem: Problem, execute: Execute) -> None:
        model = problem.model
        self.problem, self._execute = problem, execute
        self._gradient = gradient_program(problem, relu_mask="Sign")
        self._update = update_program(problem)
        self._inference: dict[tuple[str, tuple[str, ...]], Program] = {}
        self._weights = {n: model.initializer(n) for n in problem.parameters}
        self._slots = problem.slot_values()
        self._buffers = {n: buffer_value(problem, n) for n in problem.buffers}
        self._frozen: dict[str, Array] = {}
        self._step = 0
        self._last: dict[str, Array] = {}

    @staticmethod
    def reasons(problem: Problem) -> list[str]:
        """Reasons why this engine cannot train a problem; empty if it can."""
        try:
            gradient_program(problem)
        except (NoGradientRule, NotDifferentiable) as error:
            return [str(error)]
        return []

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> ReadLosses:
        """Train one step for each rate; a step has one or several batches."""
        size = self.problem.updating.accumulate
        return ReadLosses(
            [self._one(batches[k * size : (k + 1) * size], r) for k, r in enumerate(rates)]
        )

    def _one(self, batches: Sequence[Batch], rate: float) -> tuple[float, ...]:
        problem = self.problem
        denominators = [sum(of) for of in zip(*(b.denominators for b in batches), strict=True)]
        scales, constants = problem.scales(denominators), problem.constants()
        weights = _ports("parameter", self._weights)
        loss, each = 0.0, [0.0] * len(scales)
        slots = {port: self._slots[n] for n, port in problem.slot_ports.items()}
        total: dict[Key, Array] = {}
        for k, batch in enumerate(batches, self._step * problem.updating.accumulate + 1):
            given = self._columns(batch) | weights | slots | _ports("buffer", self._buffers)
            graph = self.gradient_graph(batch.size)
            results = self._run(graph, given, constants | scales | {_DRAW: k})
            totals = [float(results[t.total_port]) for t in problem.terms]
            parts = [t * s for t, s in zip(totals, scales.values(), strict=True)]
            loss += sum(parts)
            each = [before + part for before, part in zip(each, parts, strict=True)]
            gradients = {port: results[port] for port in _ports("gradient", self._weights)}
            total = {p: total[p] + g for p, g in gradients.items()} if total else gradients
            self._buffers = {
                n: results[port] for n, port in ports_of("buffer", self._buffers).items()
            }
        self._last = {n: total[port] for n, port in ports_of("gradient", self._weights).items()}
        self._step += 1
        values = constants | {_RATE: rate, _COUNTER: self._step}
        new = self._run(self._update, weights | slots | total, values)
        self._weights = {n: new[port] for n, port in ports_of("parameter", self._weights).items()}
        self._slots = {n: new[port] for n, port in problem.slot_ports.items()}
        penalty = float(new.get(stages.PENALTY, 0.0))
        return (loss, penalty, *each) if len(each) > 1 else (loss, penalty)

    def gradient_graph(self, rows: int) -> Program:
        """The graph of a batch's gradient; override it for a runtime that needs the number of rows."""
        return self._gradient

    def _columns(self, batch: Batch) -> dict[Key, Array]:
        ports = self.problem.column_ports
        return {ports[n]: batch.array(n) for n in batch.columns if n in ports}

    def _run(
        self, program: Program, arrays: Mapping[Key, Array], values: Mapping[str, float]
    ) -> dict[Key, Array]:
        feeds = program.scalars(values)
        for key, spec in program.takes.items():
            known = arrays.get(key)
            if known is None:
                assert isinstance(key, Port)
                known = self._kept(str(key.of))
            feeds[spec.name] = known
        # As in ONNX: a quotient by 0 is infinite, and the formula selects another value there.
        with np.errstate(divide="ignore", invalid="ignore"):
            results = self._execute(program, feeds)
        return {key: np.asarray(results[spec.name]) for key, spec in program.gives.items()}

    def _kept(self, name: str) -> Array:
        """A large tensor of the model that is not trained."""
        if name not in self._frozen:
            self._frozen[name] = self.problem.model.initializer(name)
        return self._frozen[name]

    def gradients(self) -> dict[str, Array]:
        """The last step's gradients of the loss, without the penalty's part."""
        return dict(self._last)

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Σ w·l per term, and outputs."""
        results = self._infer("evaluation", stages.evaluation_program, batch, outputs)
        return [float(results[t.total_port]) for t in self.problem.terms], by_name(results)

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        """Outputs."""
        return by_name(self._infer("prediction", stages.prediction_program, batch, outputs))

    def _infer(
        self,
        kind: str,
        make: Callable[[Problem, Sequence[str]], Program],
        batch: Batch,
        outputs: Sequence[str],
    ) -> dict[Key, Array]:
        key = (kind, tuple(outputs))
        if key not in self._inference:
            self._inference[key] = make(self.problem, outputs)
        arrays = self._columns(batch) | _ports("parameter", self.averages())
        arrays |= _ports("buffer", self._buffers)
        return self._run(self._inference[key], arrays, self.problem.constants())

    def averages(self) -> dict[str, Array]:
        """The weights of predictions (their averages, where these are kept) and running statistics."""
        return {**self.problem.averaged(self._weights, self._slots), **self._buffers}

    def state(self) -> dict[str, Array]:
        """Copies of the weights."""
        return {n: a.copy() for n, a in self._weights.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Replace some weights; their averages start from the new values."""
        self._weights |= _checked(state, self._weights, "parameter")
        keys = self.problem.average_keys
        self._slots |= {keys[n]: np.array(a) for n, a in state.items() if n in keys}

    def buffers(self) -> dict[str, Array]:
        """Copies of the running statistics."""
        return {n: a.copy() for n, a in self._buffers.items()}

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        """Replace some running statistics."""
        self._buffers |= _checked(buffers, self._buffers, "buffer")

    def slots(self) -> dict[str, Array]:
        """Copies of the optimizer's state."""
        return {n: a.copy() for n, a in self._slots.items()} | {"step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        """Replace the optimizer's state."""
        own = {n: a for n, a in slots.items() if n != "step"}
        self._slots |= _checked(own, self._slots, "optimizer slot")
        self._step = int(slots.get("step", self._step))

    def programs(self) -> dict[str, Program | bytes]:
        """Both graphs of a step."""
        return {"gradient": self._gradient, "update": self._update}

    def counters(self) -> dict[str, int]:
        """Empty: nothing is bound."""
        return {"steps": self._step}

    def close(self) -> None:
        """Nothing has to be released."""
