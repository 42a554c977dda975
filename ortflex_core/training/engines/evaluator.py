"""Inference during training: predictions and losses with an engine's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ortflex_core.compiler.graph.ports import COLUMNS, Key, Port
from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.model.training_mode import DRAW, buffer_value
from ortflex_core.compiler.problem.description import fed
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.programs import stages
from ortflex_core.compiler.runtime.session import get_session
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.engine_protocols import Device, Value
from ortflex_core.kernel.errors import GraphError, error_reason
from ortflex_core.kernel.types import Array

_PROGRAMS: dict[str, Callable[..., Program]] = {
    "evaluation": stages.evaluation_program,
    "prediction": stages.prediction_program,
    "statistics": stages.statistics_program,
}


class Evaluator:
    """Runs the model in inference mode on weights that belong to an engine.

    The parameters are inputs of the graphs, so no weight is copied; large frozen initializers are
    copied to the device once, or shared with it. There is no caching binder, because a binder belongs to
    one thread, and several threads may predict with one Trainer.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem = problem
        self._device = device
        self._frozen: dict[str, tuple[Value, Array]] = {}
        """The tensors and the arrays whose memory they may share."""
        self.programs: dict[tuple[str, tuple[tuple[str, ...], ...]], Program] = {}

    def frozen(self, name: str) -> Value:
        """A large frozen initializer, or a buffer with its values from the file, on the device."""
        if name not in self._frozen:
            array = buffer_value(self._problem, name)
            self._frozen[name] = self._device.share(array), array
        return self._frozen[name][0]

    def frozen_port(self, key: Key) -> Value:
        """The value of :meth:`frozen` for a port of a program."""
        assert isinstance(key, Port), f"{key!r} is not a port"
        return self.frozen(str(key.of))

    def predict(
        self, weights: Mapping[str, Value], batch: Batch, outputs: Sequence[str]
    ) -> dict[str, Array]:
        """Tensors of the graph for one batch."""
        # A Trainer that was resumed has no losses before it has data, but it has running statistics.
        buffers = tuple(n for n in weights if n not in self._problem.parameters)
        program = self._program("prediction", outputs, buffers)
        return by_name(self._run(program, weights, batch))

    def evaluate(
        self, weights: Mapping[str, Value], batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Σ w·l per loss term, and tensors of the graph, for one labeled batch."""
        program = self._program("evaluation", outputs)
        results = self._run(program, weights, batch)
        totals = [float(results[t.total_port]) for t in self._problem.terms]
        return totals, by_name(results)

    def statistics(
        self, weights: Mapping[str, Value], batch: Batch, predicted: Sequence[str], number: int
    ) -> list[tuple[str, Array]]:
        """Mean and variance of a batch, by the names of the running statistics; in training mode.

        ``number`` is that of the batch, on which random masks depend.
        """
        program = self._program("statistics", predicted)
        results = self._run(program, weights, batch, {DRAW.label: number})
        return [(str(port.of), a) for port, a in results.items() if isinstance(port, Port)]

    def _program(self, kind: str, *names: Sequence[str]) -> Program:
        key = (kind, tuple(tuple(part) for part in names))
        if key not in self.programs:
            self.programs[key] = _PROGRAMS[kind](self._problem, *names)
        return self.programs[key]

    def _run(
        self,
        program: Program,
        weights: Mapping[str, Value],
        batch: Batch,
        symbols: Mapping[str, float] | None = None,
    ) -> dict[Key, Array]:
        feeds: dict[str, Value] = {}
        for key, spec in program.takes.items():
            assert isinstance(key, Port)
            name = str(key.of)
            if key.role in COLUMNS:
                feeds[spec.name] = self._device.put(batch.array(name))
            else:
                feeds[spec.name] = weights.get(name) or self.frozen(name)
        scalars = program.scalars({**self._problem.constants(), **(symbols or {})})
        feeds |= {name: self._device.put(scalar) for name, scalar in scalars.items()}
        runner = get_session(program, self._device, self._problem.threads)._sess
        names = [o.name for o in program.outputs]
        try:
            values: Any = runner.run_with_ort_values(feeds, names, None)
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            inputs = self._problem.model.inputs
            given = fed(
                inputs, {i.name: batch.shape(i.name) for i in inputs if i.name in batch.columns}
            )
            where = f" on {given}" * bool(given)
            raise GraphError(
                f"the {program.name} graph failed{where}: {error_reason(error)}"
            ) from error
        return {key: values[k].numpy() for k, key in enumerate(program.gives)}


def by_name(results: Mapping[Key, Array]) -> dict[str, Array]:
    """The tensors of the model among the results of a program."""
    return {
        str(port.of): array
        for port, array in results.items()
        if isinstance(port, Port) and port.role == "output"
    }
