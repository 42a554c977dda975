"""An engine for backends that need only one function: run a graph from arrays to arrays.

Weights and slots are arrays on the host, a step is two graphs, and all arrays are fed to each of
them. This is not fast, but a backend on another runtime is a function of a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from ortflex_core.autodiff.reverse import gradients
from ortflex_core.data.columns import Batch
from ortflex_core.engines.evaluator import by_name
from ortflex_core.errors import NoGradientRule, NotDifferentiable
from ortflex_core.graph.ports import Key, Port, Role
from ortflex_core.graph.program import Program, build
from ortflex_core.model.training_mode import Modes
from ortflex_core.problem.problem import Problem
from ortflex_core.programs import stages, updates
from ortflex_core.types import Array

_RATE, _COUNTER, _DRAW = (Port(role).label for role in ("rate", "counter", "draw"))

Execute = Callable[[Program, Mapping[str, Array]], Mapping[str, Array]]
"""Runs a graph: ``program.model`` has its bytes, the arrays are by the names of its inputs and outputs."""


def gradient_program(problem: Problem) -> Program:
    """Parameters and a batch into loss, penalty and the gradients of both."""
    trace = problem.trace()
    weights = stages.parameter_inputs(trace, problem)
    given = weights | stages.model_inputs(trace, problem, problem.predicted)
    with trace.part("forward"):
        values = problem.model.replay(trace, problem.predicted, given, Modes(problem, {}))
    with trace.part("loss"):
        losses = stages.trace_losses(trace, problem, values)
    with trace.part("backward"):
        roots = [(values[t.term.predicted.name], t.gradient(problem)) for t in losses]
        parts = gradients(roots, list(weights.values()), problem.rules)
    with trace.part("loss"):
        outputs = {stages.LOSS: stages.add_up([t.cost for t in losses])}
    outputs |= {Port("gradient", of=n): g for n, g in zip(weights, parts, strict=True)}
    penalty = stages.penalty_cost(trace, problem, weights)
    if penalty is not None:
        extra = stages.penalty_gradients(trace, problem, weights)
        outputs |= {stages.PENALTY: penalty}
        outputs |= {Port("penalty", of=n): g for n, g in extra.items()}
    return build(trace, outputs, name="gradient")


def _ports(role: Role, arrays: Mapping[str, Array]) -> dict[Key, Array]:
    return {Port(role, of=name): array for name, array in arrays.items()}


@attrs.frozen
class Done:
    """Losses that are known already."""

    pairs: list[tuple[float, float]]

    def read(self) -> list[tuple[float, float]]:
        """(loss, penalty) per step."""
        return self.pairs


class HostEngine:
    """A compiled problem; ``execute`` runs its graphs.

    :meth:`reasons` says why a problem cannot be trained; ``supports`` of a backend returns it.

    >>> HostEngine.steps_per_run
    1
    """

    steps_per_run = 1

    def __init__(self, problem: Problem, execute: Execute) -> None:
        model = problem.model
        self.problem, self._execute = problem, execute
        self._gradient = gradient_program(problem)
        self._update = updates.update_program(problem, stages.penalized_by(self._gradient))
        self._inference: dict[tuple[str, tuple[str, ...]], Program] = {}
        self._weights = {n: model.initializer(n) for n in problem.parameters}
        self._slots = problem.slot_values()
        self._frozen: dict[str, Array] = {}
        self._step = 0
        self._last: dict[str, Array] = {}

    @staticmethod
    def reasons(problem: Problem) -> list[str]:
        """Reasons why this engine cannot train a problem; empty if it can."""
        if problem.buffers:
            return [f"it does not update running statistics ({problem.buffers[0]})"]
        if problem.updating.accumulate > 1:
            return ["it does not accumulate gradients"]
        try:
            gradient_program(problem)
        except (NoGradientRule, NotDifferentiable) as error:
            return [str(error)]
        return []

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Done:
        """Train one step a batch."""
        return Done([self._one(b, r) for b, r in zip(batches, rates, strict=True)])

    def _one(self, batch: Batch, rate: float) -> tuple[float, float]:
        values = self.problem.constants() | self.problem.scales(batch.denominators)
        step = float(self._step + 1)
        values |= {_RATE: rate, _COUNTER: step, _DRAW: step}
        weights = _ports("parameter", self._weights)
        slots = {port: self._slots[n] for n, port in self.problem.slot_ports.items()}
        results = self._run(self._gradient, self._columns(batch) | weights, values)
        self._last = {n: results[Port("gradient", of=n)] for n in self._weights}
        new = self._run(self._update, weights | slots | results, values)
        self._weights = {n: new[Port("parameter", of=n)] for n in self._weights}
        self._slots = {n: new[port] for n, port in self.problem.slot_ports.items()}
        self._step += 1
        return float(results[stages.LOSS]), float(results.get(stages.PENALTY, 0.0))

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
        return self._run(self._inference[key], arrays, self.problem.constants())

    def averages(self) -> dict[str, Array]:
        """The weights of predictions: their averages, where these are kept."""
        return self.problem.averaged(self._weights, self._slots)

    def state(self) -> dict[str, Array]:
        """Copies of the weights."""
        return {n: a.copy() for n, a in self._weights.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Replace some weights; their averages start from the new values."""
        self._weights |= {n: np.array(a) for n, a in state.items()}
        keys = self.problem.average_keys
        self._slots |= {keys[n]: np.array(a) for n, a in state.items() if n in keys}

    def buffers(self) -> dict[str, Array]:
        """None: problems with running statistics are refused."""
        return {}

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        """None, either."""

    def slots(self) -> dict[str, Array]:
        """Copies of the optimizer's state."""
        return {n: a.copy() for n, a in self._slots.items()} | {"step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        """Replace the optimizer's state."""
        self._slots |= {n: np.array(a) for n, a in slots.items() if n != "step"}
        self._step = int(slots["step"])

    def programs(self) -> dict[str, Program | bytes]:
        """Both graphs of a step."""
        return {"gradient": self._gradient, "update": self._update}

    def counters(self) -> dict[str, int]:
        """Empty: nothing is bound."""
        return {"steps": self._step}

    def close(self) -> None:
        """Nothing has to be released."""
