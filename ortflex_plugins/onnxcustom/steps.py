"""Steps of gradient descent on a model that contains its loss, by the engines of the Trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
from onnx import ModelProto

from ortflex_core import (
    Array,
    Backend,
    Batch,
    Device,
    Engine,
    GraphError,
    Loss,
    LossTerm,
    Model,
    Ops,
    Problem,
    Tensor,
    choose_parameters,
    complete_shapes,
    gradient_model,
    load_rules,
    step_program,
    write_bytes,
)
from ortflex_plugins.onnxcustom.base import save_graphs
from ortflex_plugins.onnxcustom.devices import plugins, this_runtime
from ortflex_plugins.onnxcustom.weights import with_weights

_BACKENDS: tuple[Any, ...] = ("training_session", {"name": "fused", "steps_per_run": 1})
_WHOLE = (1.0,)
"""The denominator of a loss that is a sum."""
_log = logging.getLogger("ortflex")


@attrs.frozen(kw_only=True)
class LossInside(Loss):
    """The loss that a model computes itself: its output is minimized.

    >>> LossInside().describe()
    {'name': 'loss_inside'}
    """

    name: ClassVar[str] = "loss_inside"

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The output of the model, which reads the labels itself."""
        return predicted

    def gradient(self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor) -> Tensor:
        """The cotangent."""
        return cotangent


class Steps:
    """A model with a loss of one element, whose weights are in an engine that runs single steps.

    TrainingSession is the engine if it is installed and has the right gradients, otherwise ``fused``.
    """

    def __init__(
        self,
        onx: ModelProto,
        weights: Sequence[str],
        loss: str,
        label: str,
        device: Device,
        batch_size: int,
    ) -> None:
        self._onx, self._loss = onx, loss
        self.weights = list(weights)
        self.model = Model(onx, raise_half=False)
        complete_shapes(self.model)
        predicted = self.model.value(loss)
        term = LossTerm(
            index=0,
            loss=LossInside(),
            output=loss,
            predicted=predicted,
            label=next(i for i in self.model.inputs if i.name == label),
            weight=None,
            samples=predicted.shape or (),
        )
        self._problem = Problem(
            model=self.model,
            terms=(term,),
            penalties=(),
            optimizer=plugins().component("optimizers", "sgd", "optimizer"),
            optimizer_name="sgd",
            choices=tuple(choose_parameters(self.model, [loss], self.weights)),
            reduction="sum",
            rules=load_rules(plugins()),
            plugins=plugins(),
            batch_size=batch_size,
        )
        self.name, self.engine = _engine(self._problem, device)

    def run(self, data: Mapping[str, Array], rate: float) -> float:
        """Run one step, and return the loss before it."""
        [(loss, *_)] = self.engine.run([_batch(data)], [rate]).read()
        return loss

    def evaluate(self, data: Mapping[str, Array], output: str | None = None) -> Array:
        """The loss, or another tensor, of some data with the current weights."""
        name = output or self._loss
        return self.engine.predict(_batch(data), [name])[name]

    def get_state(self) -> dict[str, Array]:
        """Copies of the weights, by name."""
        state = self.engine.state()
        return {n: state[n] for n in self.weights}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Replace weights."""
        kinds = self.model.initializers
        self.engine.load(
            {n: np.asarray(a, kinds[n].numpy if n in kinds else None) for n, a in state.items()}
        )

    def save_gradient(self, path: str) -> None:
        """Write the graph of the gradients, and to ``<path>.training.onnx`` the graph of a step."""
        gradient = gradient_model(self._onx, self.weights, [self._loss], plugins=plugins())
        write_bytes(Path(path), gradient.SerializeToString())
        write_bytes(Path(f"{path}.training.onnx"), self._step().SerializeToString())

    def _step(self) -> ModelProto:
        """The graph of a whole step, in standard operators."""
        return step_program(self._problem, rows=self._problem.batch_size).proto()

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Save the graph of a step, and the model with the current weights for evaluation."""
        evaluation = with_weights(self._onx, self.get_state())
        graphs = {"training_onnx_": self._step(), "evaluation_onnx_": evaluation}
        return save_graphs(type(self).__name__, graphs, folder, prefix, suffix)


def _batch(data: Mapping[str, Array]) -> Batch:
    return Batch(data, None, len(next(iter(data.values()))), _WHOLE)


def _engine(problem: Problem, device: Device) -> tuple[str, Engine]:
    """The name and the engine of the first backend that can train a problem."""
    runtime = this_runtime()
    for spec in _BACKENDS:
        backend: Backend = plugins().component("backends", spec, "backend")
        reasons = backend.supports(problem, device, runtime)
        if not reasons:
            try:
                return backend.name, backend.build(problem, device, runtime)
            except GraphError as error:
                reasons = [str(error)]
        _log.info("the backend %s cannot train the model: %s", backend.name, reasons[0])
    raise GraphError(f"no backend can train the model: {reasons[0]}")
