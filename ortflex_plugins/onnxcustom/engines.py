"""Forward and backward of a model with its weights as inputs: TrainingAgent's, or fused's graphs.

Both take the values of inputs and weights in one list, and give ``OrtValue`` objects.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import onnx
from onnx import ModelProto

from ortflex_core.errors import GraphError, OrtflexError, Unsupported
from ortflex_core.model import Model, Rewrite, find_nodes, reads
from ortflex_core.ops import FLOATS, Trace
from ortflex_core.program import Program, build
from ortflex_core.protocols import Device, LayerBackend, Passes, Value
from ortflex_core.session import open_session, reason, session_options
from ortflex_core.types import numpy_dtype
from ortflex_core.vjp import gradient_model
from ortflex_plugins.layers.splitting import split
from ortflex_plugins.onnxcustom.devices import own_values, own_vector, plugins, this_runtime

_AGENT = "training_agent"
_log = logging.getLogger("ortflex")


class ForwardBackward(Protocol):
    """A model that is run forward, and then back."""

    name: str
    names: tuple[str, ...]
    """Inputs, then weights: what :meth:`forward` takes."""
    gradients: tuple[str, ...]
    """Those of them that have a gradient: what :meth:`backward` gives."""
    graphs: dict[str, ModelProto]
    """``gradient``, and what else there is."""

    def forward(self, values: Sequence[Value], into: Any) -> tuple[Any, Any]:
        """Outputs, and what :meth:`backward` needs; ``into``: earlier outputs to write over."""

    def backward(self, cotangents: Sequence[Value], saved: Any, into: Any) -> Any:
        """Gradients from those of the outputs; ``into``: earlier ones to write over."""


class AgentEngine:
    """onnxruntime's TrainingAgent, by the backend ``training_agent``."""

    name = _AGENT

    def __init__(self, model: Model, weights: Sequence[str], device: Device) -> None:
        runtime = this_runtime()
        specs = {s.name: s for s in model.inputs} | {n: model.initializers[n] for n in weights}
        self.names = tuple(specs)
        self.gradients = tuple(n for n, s in specs.items() if s.dtype in FLOATS)
        backend = _agent()
        self._outputs = [o.name for o in model.outputs]
        program = forward_program(
            model, weights, backend.replacing(model, self.gradients, self._outputs)
        )
        self._passes: Passes = backend.passes(program, self.gradients, device, runtime, 1)
        self._device = device
        self._frozen = {
            n: device.put(model.initializer(n)) for n in self._passes.inputs if n not in specs
        }
        raw = getattr(self._passes, "model", program.model)
        self.graphs = {"gradient": onnx.load_model_from_string(raw)}

    def _like(self, value: Value) -> Value:
        return self._device.empty(list(value.shape()), numpy_dtype(value.element_type()))

    def forward(self, values: Sequence[Value], into: Any) -> tuple[Any, Any]:
        """See :class:`ForwardBackward`."""
        passes = self._passes
        given = dict(zip(self.names, values, strict=True))
        feeds = passes.pack([given.get(n) or self._frozen[n] for n in passes.inputs])
        made = passes.pack([])
        state = passes.forward(feeds, made)
        # The backward pass may use the outputs' memory for something else, so these are copies.
        fresh = into
        if fresh is None:
            fresh = passes.pack(
                [self._like(made[k]) for k in _places(passes.outputs, self._outputs)]
            )
        for k, place in enumerate(_places(passes.outputs, self._outputs)):
            view = self._device.view(made[place])
            self._device.write(fresh[k], self._device.read(made[place]) if view is None else view)
        return fresh, (state, feeds, made, values)

    def backward(self, cotangents: Sequence[Value], saved: Any, into: Any) -> Any:
        """See :class:`ForwardBackward`."""
        passes = self._passes
        state, _, _, values = saved
        if into is None:
            given = dict(zip(self.names, values, strict=True))
            into = passes.pack([self._like(given[n]) for n in self.gradients])
        seeds = [cotangents[k] for k in _places(self._outputs, passes.differentiable)]
        fetches = [into[k] for k in _places(self.gradients, passes.gradients)]
        passes.backward(passes.pack(seeds), passes.pack(fetches), state)
        return into


def _places(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    known = {name: k for k, name in enumerate(names)}
    return [known[name] for name in wanted]


class GraphEngine:
    """The gradient graph that the backend ``fused`` trains with, split in two."""

    name = "fused"

    def __init__(self, model: Model, weights: Sequence[str], device: Device) -> None:
        specs = {s.name: s for s in model.inputs} | {n: model.initializers[n] for n in weights}
        self.names = tuple(specs)
        self._outputs = [o.name for o in model.outputs]
        self._seeded = [o.name for o in model.outputs if o.dtype in FLOATS]
        read = {n for node in model.ancestors(self._seeded) for n in reads(node)}
        self.gradients = tuple(n for n, s in specs.items() if s.dtype in FLOATS and n in read)
        whole = gradient_model(model, self.gradients, self._seeded, plugins=plugins())
        halves = split(whole)
        self.graphs = {"gradient": whole}
        self._device = device
        self._saved = halves.saved
        self._forward = _Half(halves.forward, device)
        self._backward = _Half(halves.backward, device)

    def forward(self, values: Sequence[Value], into: Any) -> tuple[Any, Any]:
        """See :class:`ForwardBackward`."""
        given = dict(zip(self.names, values, strict=True))
        made = self._forward(given, {})
        kept = given | {n: made[n] for n in self._saved}
        return own_vector([made[n] for n in self._outputs]), kept

    def backward(self, cotangents: Sequence[Value], saved: Any, into: Any) -> Any:
        """See :class:`ForwardBackward`."""
        if into is None:
            like = [saved[n] for n in self.gradients]
            into = own_vector(
                [self._device.empty(list(v.shape()), numpy_dtype(v.element_type())) for v in like]
            )
        given = dict(zip(self._outputs, cotangents, strict=True))
        seeds = {f"cotangent/{n}": given[n] for n in self._seeded}
        targets = {f"gradient/{n}": into[k] for k, n in enumerate(self.gradients)}
        self._backward(saved | seeds, targets)
        return into


class _Half:
    """A graph that is run on values by name; outputs go where they are told, else into new memory."""

    def __init__(self, model: ModelProto, device: Device) -> None:
        self._name = model.graph.name
        try:
            self._session = open_session(model.SerializeToString(), session_options(1), device)
        except Exception as error:  # onnxruntime raises classes of its own, made in C++
            raise GraphError(
                f"onnxruntime refuses the {self._name} graph: {reason(error)}"
            ) from error
        self._inputs = [i.name for i in model.graph.input]
        self._outputs = [o.name for o in model.graph.output]
        self._place = device.ort_device()

    def __call__(
        self, given: Mapping[str, Value], targets: Mapping[str, Value]
    ) -> dict[str, Value]:
        bind = self._session.io_binding()._iobinding
        for name in self._inputs:
            bind.bind_ortvalue_input(name, given[name])
        for name in self._outputs:
            if name in targets:
                bind.bind_ortvalue_output(name, targets[name])
            else:
                bind.bind_output(name, self._place)
        try:
            self._session._sess.run_with_iobinding(bind, None)
        except Exception as error:  # as above
            raise GraphError(f"the {self._name} graph failed: {reason(error)}") from error
        return dict(zip(self._outputs, own_values(bind.get_outputs()), strict=True))


def forward_program(
    model: Model, weights: Sequence[str], rewrite: Rewrite | None = None
) -> Program:
    """The model with weights as inputs."""
    trace = Trace(model.opsets)
    specs = {s.name: s for s in model.inputs} | {n: model.initializers[n] for n in weights}
    given = {n: trace.input(n, s.dtype, s.shape) for n, s in specs.items()}
    values = model.replay(trace, [o.name for o in model.outputs], given, rewrite)
    return build(trace, values, name="forward")


def _agent() -> LayerBackend:
    backend = plugins().component("backends", _AGENT, "backend")
    if not isinstance(backend, LayerBackend):
        raise Unsupported(f"the backend {_AGENT!r} that is installed runs no layers")
    return backend


def engine_for(model: Model, weights: Sequence[str], device: Device) -> ForwardBackward:
    """TrainingAgent where it is and can, else the gradient graph."""
    kinds = ("BatchNormalization", "Dropout")  # which the agent would put into training mode
    modal = any(find_nodes(model.internal.graph, k) for k in kinds)
    try:
        if not modal and not _agent().available(this_runtime()):
            return AgentEngine(model, weights, device)
    except OrtflexError as error:  # operators that it gets wrong, or has no gradient of
        _log.info("TrainingAgent cannot run the model, the gradient graph does: %s", error)
    return GraphEngine(model, weights, device)
