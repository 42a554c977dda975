"""One graph a step for a model that has its loss inside: TrainingSession's, or fused's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from ortflex_core import passes
from ortflex_core.autodiff import gradients
from ortflex_core.binder import Binder, HostVector
from ortflex_core.errors import DataError, GraphError, nearest
from ortflex_core.files import write_bytes
from ortflex_core.host import Host
from ortflex_core.model import Model
from ortflex_core.ops import Tensor, Trace
from ortflex_core.program import Program, build
from ortflex_core.protocols import Device
from ortflex_core.session import reason, session, session_options
from ortflex_core.types import Array, TensorSpec, onnx_dtype
from ortflex_plugins.backends import ort_gradients
from ortflex_plugins.backends.buffers import Scalar, Twins, check_state
from ortflex_plugins.backends.training_session import native_session
from ortflex_plugins.onnxcustom.base import save_graphs
from ortflex_plugins.onnxcustom.devices import plugins, this_runtime

_RATE = "Learning_Rate"
_log = logging.getLogger("ortflex")


class Steps:
    """A model with a loss [1, 1], and its weights; one :meth:`run` is one step of descent.

    Data are bound by :meth:`bind_input`, as to onnxruntime's own bindings.
    """

    name: ClassVar[str]

    def __init__(self, model: Model, weights: Sequence[str], loss: str, device: Device) -> None:
        self.model = model
        self.weights = list(weights)
        self.loss_name = loss
        self.device = device
        self.data = {i.name: i for i in model.inputs}
        spec = model.value(loss)
        sizes = [d for d in spec.shape or () if isinstance(d, int)]
        known = spec.shape is not None and len(sizes) == len(spec.shape)
        self._cost = device.empty(sizes if known else [1, 1], spec.numpy)
        self._loss = Scalar(device, self._cost)
        trace, values, _ = self._trace([loss])
        self.evaluation = build(trace, values, name="evaluation")
        self._evaluating: dict[tuple[str, ...], Program] = {(loss,): self.evaluation}

    def _trace(self, outputs: Sequence[str], rewrite: Any = None) -> tuple[Trace, Any, Any]:
        """The model with its weights as inputs, up to some tensors."""
        trace = Trace(self.model.opsets)
        specs = {**self.data, **{n: self.model.initializers[n] for n in self.weights}}
        given = {n: trace.input(n, s.dtype, s.shape) for n, s in specs.items()}
        return trace, self.model.replay(trace, outputs, given, rewrite), given

    def _binder(self) -> Binder:
        """What the next step reads its data from."""
        raise NotImplementedError

    def bind_input(self, name: str, device: Any, dtype: Any, shape: Any, pointer: int) -> None:
        """Bind data by their address; whoever calls keeps them alive until :meth:`run` is done."""
        spec = TensorSpec(name, onnx_dtype(np.dtype(dtype)), tuple(shape))
        self._binder().input_at(spec, self, device, pointer)  # type: ignore[arg-type]

    def run(self, rate: float) -> float:
        """One step; returns the loss before it."""
        raise NotImplementedError

    def evaluate(self, data: Mapping[str, Array], output: str | None = None) -> Array:
        """The loss (or another tensor) of some data, with the weights of now.

        Raises:
            GraphError: onnxruntime refuses the data.
        """
        wanted = output or self.loss_name
        if (wanted,) not in self._evaluating:
            trace, values, _ = self._trace([wanted])
            self._evaluating[wanted,] = build(trace, values, name="evaluation")
        program = self._evaluating[wanted,]
        known: dict[str, Array] = {**data, **self.get_state()}
        feeds = {
            i.name: known[i.name] if i.name in known else self.model.initializer(i.name)
            for i in program.inputs
        }
        try:
            [result] = session(program, self.device).run([wanted], feeds)
        except Exception as error:  # onnxruntime raises classes of its own, made in C++
            raise GraphError(f"the evaluation graph failed: {reason(error)}") from error
        return np.asarray(result)

    def get_state(self) -> dict[str, Array]:
        """Copies of the weights, by name."""
        raise NotImplementedError

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Replace weights.

        Raises:
            DataError: an unknown name or another shape.
        """
        raise NotImplementedError

    def _checked(self, state: Mapping[str, Array]) -> dict[str, Array]:
        shapes: dict[str, Any] = {n: self.model.initializers[n].shape for n in self.weights}
        if not isinstance(state, Mapping):
            raise DataError(
                f"state: expected arrays by the names {', '.join(shapes)}, got {type(state).__name__}"
            )
        for name in state:
            if name not in shapes:
                raise DataError(f"unknown weight {name!r}; {nearest(name, shapes)}")
        check_state(state, shapes, "weight")
        kinds = self.model.initializers
        return {n: np.asarray(a, dtype=kinds[n].numpy, order="C") for n, a in state.items()}

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Save the graph of a step and that of an evaluation."""
        graphs = {"training_onnx_": self.graph(), "evaluation_onnx_": self.evaluation.proto()}
        return save_graphs(type(self).__name__, graphs, folder, prefix, suffix)

    def graph(self) -> ModelProto:
        """The graph of a step."""
        raise NotImplementedError


class FusedSteps(Steps):
    """Loss, gradients and update in one graph of standard operators."""

    name = "fused"

    def __init__(
        self,
        model: Model,
        weights: Sequence[str],
        loss: str,
        device: Device,
        saved_gradient: str | None = None,
    ) -> None:
        super().__init__(model, weights, loss, device)
        trace, values, given = self._trace([loss])
        cost: Tensor = values[loss]
        rules = plugins().rules()
        found = gradients([(cost, None)], [given[n] for n in self.weights], rules)
        outputs = {loss: cost}
        shown = outputs | {f"gradient/{n}": g for n, g in zip(self.weights, found, strict=True)}
        for name, gradient in zip(self.weights, found, strict=True):
            outputs[f"new/{name}"] = given[name] - Host.symbol("rate") * gradient
        self._program = _optimized(trace, outputs, "step")
        if saved_gradient is not None:
            write_bytes(Path(saved_gradient), _optimized(trace, shown, "gradient").model)
            write_bytes(Path(f"{saved_gradient}.training.onnx"), self._program.model)
        state = {n: model.initializer(n) for n in self.weights}
        self._twins = Twins(device, state)
        self._hosts = HostVector(self._program, device, {})
        self._binders = [self._bound(old) for old in (0, 1)]

    def _bound(self, old: int) -> Binder:
        binder = Binder(session(self._program, self.device), "step")
        versions = self._twins.versions
        for spec in self._program.inputs:
            if spec.name in versions[old]:
                binder.input(spec.name, versions[old][spec.name])
            elif spec.name not in self.data:
                binder.input(spec.name, self.device.put(self.model.initializer(spec.name)))
        binder.hosts(self._hosts)
        binder.output(self.loss_name, self._cost)
        for name, value in versions[1 - old].items():
            binder.output(f"new/{name}", value)
        return binder

    def _binder(self) -> Binder:
        return self._binders[self._twins.current]

    def run(self, rate: float) -> float:
        """See :meth:`Steps.run`."""
        self._hosts.update({"rate": rate})
        self._binder().run()
        self._twins.current = 1 - self._twins.current
        return self._loss.read()

    def get_state(self) -> dict[str, Array]:
        """See :meth:`Steps.get_state`."""
        return self._twins.read()

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See :meth:`Steps.load_state`."""
        self._twins.write(self._checked(state), "weight")

    def graph(self) -> ModelProto:
        """See :meth:`Steps.graph`."""
        return self._program.proto()


def _optimized(trace: Trace, outputs: Mapping[str, Tensor], name: str) -> Program:
    made, named = passes.optimize(trace, outputs)
    return build(made, named, name=name)


class SessionSteps(Steps):
    """onnxruntime's TrainingSession."""

    name = "training_session"

    def __init__(
        self,
        model: Model,
        weights: Sequence[str],
        loss: str,
        device: Device,
        saved_gradient: str | None = None,
    ) -> None:
        super().__init__(model, weights, loss, device)
        self._program = session_program(self)
        self.session = self._open(saved_gradient)
        rate = device.empty([1], np.float32)
        self._rate = Scalar(device, rate)
        self._bindings = Binder(self.session, "training")
        self._bindings.input(_RATE, rate)
        self._bindings.output(loss, self._cost)

    def _open(self, saved_gradient: str | None) -> Any:
        from onnxruntime.capi import _pybind_state as state

        proto = self._program.proto()
        # The runtime wants trained weights among the inputs and among the initializers.
        for info in list(proto.graph.input):
            if info.name not in self.data:
                array = self.model.initializer(info.name)
                proto.graph.initializer.append(onnx.numpy_helper.from_array(array, info.name))
                if info.name not in self.weights:
                    proto.graph.input.remove(info)
        asked = state.TrainingParameters()
        asked.loss_output_name = self.loss_name
        asked.use_mixed_precision = False
        asked.enable_grad_norm_clip = False
        asked.weights_to_train = set(self.weights)
        asked.training_optimizer_name = "SGDOptimizer"
        asked.optimizer_attributes_map = {n: {} for n in self.weights}
        asked.optimizer_int_attributes_map = {n: {} for n in self.weights}
        if saved_gradient is not None:
            asked.model_with_gradient_graph_path = str(saved_gradient)
            asked.model_with_training_graph_path = f"{saved_gradient}.training.onnx"
        options = session_options(1)
        # In the default order a weight may be updated before the backward pass has read it.
        options.execution_order = state.ExecutionOrder.PRIORITY_BASED
        try:
            return native_session()(
                proto.SerializeToString(), asked, options, providers=self.device.providers()
            )
        except Exception as error:  # onnxruntime raises classes of its own, made in C++
            raise GraphError(f"TrainingSession refuses the graph: {reason(error)}") from error

    def _binder(self) -> Binder:
        return self._bindings

    def run(self, rate: float) -> float:
        """See :meth:`Steps.run`."""
        self._rate.write(rate)
        self._bindings.run()
        return self._loss.read()

    def get_state(self) -> dict[str, Array]:
        """See :meth:`Steps.get_state`."""
        everything = self.session.get_state()
        return {n: np.array(everything[n]) for n in self.weights}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See :meth:`Steps.load_state`."""
        self.session.load_state(self._checked(state), strict=False)

    def graph(self) -> ModelProto:
        """The graph that the runtime differentiates and completes by itself."""
        return self._program.proto()


def session_program(steps: Steps) -> Program:
    """The loss, as onnxruntime's gradient builder needs it."""
    rewriting = ort_gradients.replacing(steps.model, steps.weights, [steps.loss_name])
    trace, values, _ = steps._trace([steps.loss_name], rewriting)
    return build(trace, values, name="training")


def against_session(steps: Steps) -> list[str]:
    """Why TrainingSession cannot rightly train a model; empty if it can."""
    runtime = this_runtime()
    if not runtime.has_training_session:
        return [f"{runtime} has no TrainingSession"]
    kinds = steps.model.initializers
    others = [n for n in steps.weights if kinds[n].dtype != TensorProto.FLOAT]
    if others:
        return [f"it trains float32 only, {others[0]!r} is another type"]
    program = session_program(steps)
    return ort_gradients.operators_without_gradient(
        program.proto(), steps.weights, steps.loss_name, runtime
    )


def steps_for(
    model: Model, weights: Sequence[str], loss: str, device: Device, saved_gradient: str | None
) -> Steps:
    """TrainingSession where it is and can, else the fused step."""
    reasons = against_session(Steps(model, weights, loss, device))
    if not reasons:
        try:
            return SessionSteps(model, weights, loss, device, saved_gradient)
        except GraphError as error:
            reasons = [str(error)]
    _log.info("TrainingSession cannot train the model, the fused step does: %s", reasons[0])
    return FusedSteps(model, weights, loss, device, saved_gradient)
