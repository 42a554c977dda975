"""Inference beside training: predictions and losses from an engine's own weights, nothing updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortflex_core import compose
from ortflex_core.data import Batch
from ortflex_core.errors import GraphError
from ortflex_core.host import HostProgram
from ortflex_core.modes import buffer_value
from ortflex_core.problem import Problem
from ortflex_core.program import Program
from ortflex_core.protocols import Device, Value
from ortflex_core.session import reason, session
from ortflex_core.types import Array


class Evaluator:
    """Runs the model in inference mode over weights that somebody else owns.

    The graphs have the parameters as inputs, so that no weight is copied; large frozen
    initializers are put on the device once.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem = problem
        self._device = device
        self._frozen: dict[str, Value] = {}
        self.programs: dict[str, Program] = {}

    def frozen(self, name: str) -> Value:
        """A large initializer that nobody trains, or a buffer as the file has it, on the device."""
        if name not in self._frozen:
            self._frozen[name] = self._device.put(buffer_value(self._problem, name))
        return self._frozen[name]

    def predict(
        self, weights: Mapping[str, Value], batch: Batch, outputs: Sequence[str]
    ) -> dict[str, Array]:
        """Tensors of the graph for one batch."""
        program = self._program("prediction", outputs)
        return self._run(program, weights, batch)

    def evaluate(
        self, weights: Mapping[str, Value], batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Σ w·l per loss term, and tensors of the graph, for one labelled batch."""
        program = self._program("evaluation", outputs)
        results = self._run(program, weights, batch)
        totals = [float(results.pop(f"total/{t.index}")) for t in self._problem.terms]
        return totals, results

    def _program(self, kind: str, outputs: Sequence[str]) -> Program:
        key = f"{kind}:{','.join(outputs)}"
        if key not in self.programs:
            make = (
                compose.evaluation_program if kind == "evaluation" else compose.prediction_program
            )
            self.programs[key] = make(self._problem, outputs)
        return self.programs[key]

    def _run(
        self, program: Program, weights: Mapping[str, Value], batch: Batch
    ) -> dict[str, Array]:
        feeds: dict[str, Value] = {}
        for spec in program.inputs:
            if spec.name in batch.columns:
                feeds[spec.name] = self._device.put(batch.array(spec.name))
            else:
                feeds[spec.name] = weights.get(spec.name) or self.frozen(spec.name)
        numbers = HostProgram([h.expression for h in program.hosts])(self._problem.constants())
        for host, number in zip(program.hosts, numbers, strict=True):
            feeds[host.spec.name] = self._device.put(np.asarray(number, dtype=host.spec.numpy))
        runner = session(program, self._device, self._problem.threads)._sess
        names = [o.name for o in program.outputs]
        try:
            values: Any = runner.run_with_ort_values(feeds, names, None)
        except Exception as error:  # onnxruntime raises classes of its own, made in C++
            raise GraphError(f"the {program.name} graph failed: {reason(error)}") from error
        return {name: values[k].numpy() for k, name in enumerate(names)}
