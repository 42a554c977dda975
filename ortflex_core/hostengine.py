"""An engine for backends that can run a graph from arrays to arrays, and need to know nothing else.

Weights and slots are arrays on the host, a step is two graphs, and everything is fed anew at each
one: not fast, but a backend on another runtime is a function of a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from ortflex_core import compose, updates
from ortflex_core.autodiff import gradients
from ortflex_core.data import Batch
from ortflex_core.errors import NoGradientRule, NotDifferentiable
from ortflex_core.host import HostProgram
from ortflex_core.modes import Modes
from ortflex_core.problem import Problem
from ortflex_core.program import Program, build
from ortflex_core.types import Array

Execute = Callable[[Program, Mapping[str, Array]], Mapping[str, Array]]
"""Runs a graph: ``program.model`` has its bytes, the arrays are by the names of its inputs and outputs."""


def gradient_program(problem: Problem) -> Program:
    """Parameters and a batch into ``loss``, ``penalty`` and the gradients of both."""
    trace = problem.trace()
    weights = compose.parameter_inputs(trace, problem)
    given = weights | compose.model_inputs(trace, problem, problem.predicted)
    values = problem.model.replay(trace, problem.predicted, given, Modes(problem, {}))
    losses = compose.traced_losses(trace, problem, values)
    roots = [(values[t.term.predicted.name], t.gradient(problem)) for t in losses]
    parts = gradients(roots, list(weights.values()), problem.rules)
    outputs = {"loss": compose.add_up([t.cost for t in losses])}
    outputs |= {f"gradient/{n}": g for n, g in zip(weights, parts, strict=True)}
    penalty = compose.penalty_cost(trace, problem, weights)
    if penalty is not None:
        extra = compose.penalty_gradients(trace, problem, weights)
        outputs |= {"penalty": penalty} | {f"penalty/{n}": g for n, g in extra.items()}
    return build(trace, outputs, name="gradient")


@attrs.frozen
class Done:
    """Losses that are known already."""

    pairs: list[tuple[float, float]]

    def read(self) -> list[tuple[float, float]]:
        """(loss, penalty) per step."""
        return self.pairs


class HostEngine:
    """A compiled problem; ``execute`` runs its graphs.

    What it cannot train, :meth:`reasons` says; a backend's ``supports`` returns that.

    >>> HostEngine.steps_per_run
    1
    """

    steps_per_run = 1

    def __init__(self, problem: Problem, execute: Execute) -> None:
        model = problem.model
        self.problem, self._execute = problem, execute
        self._gradient = gradient_program(problem)
        names = [o.name for o in self._gradient.outputs]
        penalized = [n.removeprefix("penalty/") for n in names if n.startswith("penalty/")]
        self._update = updates.update_program(problem, penalized)
        self._inference: dict[str, Program] = {}
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
        values = self.problem.constants()
        for term, denominator in zip(self.problem.terms, batch.denominators, strict=True):
            below = 1.0 if self.problem.reduction == "sum" else denominator
            values[f"{term.prefix}/scale"] = term.factor / below if denominator else 0.0
        values |= {"rate": rate, "step": self._step + 1}
        columns = {n: batch.array(n) for n in batch.columns}
        made = self._run(self._gradient, columns | self._weights, values)
        self._last = {n: a for n, a in made.items() if n.startswith("gradient/")}
        new = self._run(self._update, self._weights | self._slots | made, values)
        self._weights = {n: new[f"new/{n}"] for n in self._weights}
        self._slots = {n: new[f"new/{n}"] for n in self._slots}
        self._step += 1
        return float(made["loss"]), float(made.get("penalty", 0.0))

    def _run(
        self, program: Program, arrays: Mapping[str, Array], values: Mapping[str, float]
    ) -> dict[str, Array]:
        numbers = HostProgram([h.expression for h in program.hosts])(values)
        feeds = {
            h.spec.name: np.asarray(number, dtype=h.spec.numpy)
            for h, number in zip(program.hosts, numbers, strict=True)
        }
        for spec in program.inputs:
            known = arrays.get(spec.name)
            feeds[spec.name] = self._kept(spec.name) if known is None else known
        return {n: np.asarray(a) for n, a in self._execute(program, feeds).items()}

    def _kept(self, name: str) -> Array:
        """A large tensor of the model that nobody trains."""
        if name not in self._frozen:
            self._frozen[name] = self.problem.model.initializer(name)
        return self._frozen[name]

    def gradients(self) -> dict[str, Array]:
        """The last step's gradients of the loss, without the penalty's part."""
        return {n.removeprefix("gradient/"): a for n, a in self._last.items()}

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Σ w·l per term, and outputs."""
        made = self._infer("evaluation", compose.evaluation_program, batch, outputs)
        totals = [float(made.pop(f"total/{t.index}")) for t in self.problem.terms]
        return totals, made

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        """Outputs."""
        return self._infer("prediction", compose.prediction_program, batch, outputs)

    def _infer(
        self,
        kind: str,
        make: Callable[[Problem, Sequence[str]], Program],
        batch: Batch,
        outputs: Sequence[str],
    ) -> dict[str, Array]:
        key = f"{kind}:{','.join(outputs)}"
        if key not in self._inference:
            self._inference[key] = make(self.problem, outputs)
        columns = {n: batch.array(n) for n in batch.columns}
        return self._run(self._inference[key], columns | self.averages(), self.problem.constants())

    def averages(self) -> dict[str, Array]:
        """What predictions are made with: the averages of the weights, where any are kept."""
        return {n: self._slots.get(f"{updates.AVERAGE}/{n}", a) for n, a in self._weights.items()}

    def state(self) -> dict[str, Array]:
        """Copies of the weights."""
        return {n: a.copy() for n, a in self._weights.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """New weights for some, which their averages then start from."""
        self._weights |= {n: np.array(a) for n, a in state.items()}
        if self.problem.updating.average is not None:
            self._slots |= {f"{updates.AVERAGE}/{n}": np.array(a) for n, a in state.items()}

    def buffers(self) -> dict[str, Array]:
        """None: problems with running statistics are refused."""
        return {}

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        """None, either."""

    def slots(self) -> dict[str, Array]:
        """Copies of the optimizer's state."""
        return {n: a.copy() for n, a in self._slots.items()} | {"step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        """The optimizer's state as it was."""
        self._slots |= {n: np.array(a) for n, a in slots.items() if n != "step"}
        self._step = int(slots["step"])

    def programs(self) -> dict[str, Program | bytes]:
        """Both graphs of a step."""
        return {"gradient": self._gradient, "update": self._update}

    def counters(self) -> dict[str, int]:
        """Nothing is bound, so nothing is bound again."""
        return {"steps": self._step}

    def close(self) -> None:
        """Nothing is held."""
